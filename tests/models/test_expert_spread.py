"""Options of expert parallelism, and what they make of a model's description and sources."""

from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.config.groups.parallel import ParallelOptions
from penstock.config.ranks import Place
from penstock.models.description.decoder import Decoder, Experts
from penstock.models.families.registry import parse_model_config
from penstock.models.shards.experts import read_expert_load, with_experts_spread
from penstock.models.shards.shard import shard_of
from penstock.models.shards.sources import sources_of
from penstock.models.weights.decoder import ExpertsSources

_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip
_MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2, **_SIZES}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8,
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], **_SIZES,
}  # fmt: skip
_LLAMA = {"architectures": ["LlamaForCausalLM"], **_SIZES}


def _options(**others: object) -> ParallelOptions:
    return ParallelOptions(tensor_parallel_size=2, enable_expert_parallel=True, **others)  # type: ignore[arg-type]


def _layer_of(config: dict[str, object], options: ParallelOptions, rank: int) -> tuple[Experts, ExpertsSources]:
    its = shard_of(with_experts_spread(parse_model_config(config), options), Place(rank, 2))
    assert isinstance(its, Decoder)
    experts, sources = its.layers[1].mlp, sources_of(its).layers[1].mlp
    assert isinstance(experts, Experts)
    assert isinstance(sources, ExpertsSources)
    return experts, sources


def test_a_rank_reads_its_experts_only() -> None:
    found = [_layer_of(_MIXTRAL, _options(), rank) for rank in range(2)]
    names = [sources.gate_up.weight.names for _, sources in found]
    prefix = "model.layers.1.block_sparse_moe.experts"
    assert names[1] == tuple(f"{prefix}.{expert}.{part}.weight" for expert in (3, 4, 5) for part in ("w1", "w3"))
    assert not set(names[0]) & set(names[1])
    assert all(experts.size == 48 and experts.count == 6 for experts, _ in found), "they are whole"


def test_a_rank_reads_its_part_of_a_tensor_of_all_experts() -> None:
    for rank in range(2):
        _, sources = _layer_of(_GPT_OSS, _options(num_redundant_experts=1), rank)
        for linear in (sources.gate_up, sources.down):
            assert linear.bias is not None
            held = ((0, 4),) if not rank else ((3, 6),)
            assert linear.weight.cut(0).items == linear.bias.cut(0).items == held
            assert linear.weight.cut(0).inputs is None


def test_a_file_of_loads(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text('{"layers": {"1": [900, 1, 1, 1, 1, 1]}, "object": "expert_load"}')
    assert read_expert_load(path) == {1: [900, 1, 1, 1, 1, 1]}
    model = with_experts_spread(parse_model_config(_MIXTRAL), _options(num_redundant_experts=1, expert_load=str(path)))
    assert isinstance(model, Decoder)
    placed = [mlp.spread.ranks_of for layer in model.layers if isinstance(mlp := layer.mlp, Experts) and mlp.spread]
    assert placed[1][0] == (0, 1), "the expert that most tokens go to has two copies"
    assert sum(len(ranks) for ranks in placed[0]) == 7


@pytest.mark.parametrize(
    ("options", "config", "complaint"),
    [
        (ParallelOptions(num_redundant_experts=2), _MIXTRAL, "--num-redundant-experts needs --enable-expert-parallel"),
        (ParallelOptions(expert_exchange="all-to-all"), _MIXTRAL, "expert_exchange needs --enable-expert-parallel"),
        (ParallelOptions(expert_load="x"), _MIXTRAL, "--expert-load needs --enable-expert-parallel"),
        (ParallelOptions(enable_expert_parallel=True), _MIXTRAL, "needs --tensor-parallel-size of at least 2"),
        (_options(), _LLAMA, "LlamaForCausalLM has no experts"),
        (_options(num_redundant_experts=7), _MIXTRAL, "at most 6"),
        (_options(expert_load="/nowhere"), _MIXTRAL, "cannot read '/nowhere'"),
        (_options(expert_load=__file__), _MIXTRAL, "is not what GET /debug/expert_load answers"),
    ],
)
def test_refused(options: ParallelOptions, config: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        with_experts_spread(parse_model_config(config), options)
