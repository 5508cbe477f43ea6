"""What families read of a config.json, and which names of tensors they know."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.config.options import ConfigError
from penstock.models import families
from penstock.models.check import model_tensors
from penstock.models.description.decoder import Attention, Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.description.recurrent import Mamba2
from penstock.models.families.registry import expected_tensors, parse_model_config
from penstock.models.files.source import Checkpoint, LoadError
from penstock.models.finding.registry import open_checkpoint
from penstock.models.parsing.by_transformers import TransformersConfig

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
OPT_350M = {"word_embed_proj_dim": 8, "do_layer_norm_before": False}
MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def parse(architecture: str, **fields: Any) -> Decoder:
    config = parse_model_config({"architectures": [architecture], **SIZES, **fields}, "own")
    assert isinstance(config, Decoder)
    return config


def attentions(decoder: Decoder) -> list[Attention]:
    return [layer.mixer for layer in decoder.layers if isinstance(layer.mixer, Attention)]


def stored(folder: Path, tensors: dict[str, tuple[int, ...]]) -> Checkpoint:
    """A checkpoint of weights that nobody reads."""
    (folder / "config.json").write_text("{}")
    header: dict[str, Any] = {}
    size = 0
    for name, shape in tensors.items():
        end = size + 2 * math.prod(shape)
        header[name], size = {"dtype": "BF16", "shape": shape, "data_offsets": [size, end]}, end
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return open_checkpoint(folder)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return expected_tensors(config) or {}


@pytest.mark.parametrize(("architecture", "base"), [("GPT2LMHeadModel", "transformer."), ("OPTForCausalLM", "model.")])
def test_names_may_begin_later(architecture: str, base: str, tmp_path: Path) -> None:
    config = parse(architecture, n_embd=16, n_head=2, n_layer=2)
    expected = shapes(config)
    assert all(name.startswith(base) for name in expected)
    for tensors in (expected, {name.removeprefix(base): shape for name, shape in expected.items()}):
        assert model_tensors(stored(tmp_path, tensors), config).stored.keys() == expected.keys()


def test_layers_for_drafts_may_be_there(tmp_path: Path) -> None:
    config = parse("Glm4MoeForCausalLM", num_nextn_predict_layers=1, **MIXTURE)
    for num_more, is_good in ((1, True), (2, False)):
        more = {f"model.layers.{4 + i}.eh_proj.weight": (16, 32) for i in range(num_more)}
        checkpoint = stored(tmp_path, shapes(config) | more)
        if is_good:
            assert model_tensors(checkpoint, config)
        else:
            with pytest.raises(LoadError, match=r"model\.layers\.5"):
                model_tensors(checkpoint, config)


def test_what_our_blocks_cannot_compute_is_left_to_others() -> None:
    raw = {"architectures": ["OPTForCausalLM"], **SIZES, **OPT_350M}
    assert isinstance(parse_model_config(raw), TransformersConfig)
    with pytest.raises(ConfigError, match="OPT-350m"):
        parse_model_config(raw, "own")


def test_a_family_is_read_at_one_sitting() -> None:
    folder = Path(families.__path__[0])
    long = {path.name for path in folder.glob("*.py") if len(path.read_text().splitlines()) > 250}
    assert long <= {"decoders.py", "registry.py", "rope.py"}, "only what all families share may be longer"


def test_code_that_a_known_architecture_brings_is_left() -> None:
    code = {"AutoConfig": "configuration_phi.PhiConfig", "AutoModelForCausalLM": "modeling_phi.PhiForCausalLM"}
    assert parse("PhiForCausalLM", auto_map=code) == parse("PhiForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "4 times 0 or 1"),
        ("Cohere2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Glm4MoeForCausalLM", MIXTURE | {"num_experts_per_tok": 5}, "5 of 4 experts cannot be chosen"),
        ("Glm4MoeForCausalLM", MIXTURE | {"n_group": 3}, r"1 of 3 groups \(4 experts\)"),
        (
            "Glm4MoeForCausalLM",
            MIXTURE | {"n_group": 2, "num_experts_per_tok": 3},
            "3 experts cannot come from 1 groups of 2",
        ),
        ("Glm4MoeForCausalLM", MIXTURE | {"n_group": 4, "topk_group": 3}, "2 experts cannot come from 3 groups of 1"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention"),
        ("GPTNeoXForCausalLM", {"hidden_size": 1}, "not enough for 2 attention heads"),
        ("JambaForCausalLM", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("KimiLinearForCausalLM", {"mla_use_nope": False}, "mla_use_nope"),
        ("KimiLinearForCausalLM", {"mlp_layer_types": ["dense"]}, "dense or sparse 4 times"),
        ("KimiLinearForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("KimiLinearForCausalLM", {"moe_router_activation_func": "softmax"}, "'softmax' is not supported"),
        ("KimiLinearForCausalLM", {"qk_rope_head_dim": 7}, "must be even, got 7"),
        (
            "KimiLinearForCausalLM",
            {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1, 2, 3]}},
            "each of 1 to 4 once",
        ),
        ("MambaForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("OlmoHybridForCausalLM", {"linear_num_key_heads": 2, "linear_num_value_heads": 3}, "no multiple of"),
        ("CohereForCausalLM", {"num_attention_heads": 1 << 20, "hidden_size": 1 << 26}, "too many"),
    ],
)
def test_refusals(architecture: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(architecture, **fields)


def test_layers_that_know_no_positions() -> None:
    def rotated(decoder: Decoder) -> list[bool]:
        return [attention.rope is not None for attention in attentions(decoder)]

    assert rotated(parse("SmolLM3ForCausalLM")) == [True, True, True, False]
    assert rotated(parse("Exaone4ForCausalLM", sliding_window_pattern="LLLG")) == [True, True, True, False]
    assert rotated(parse("Exaone4ForCausalLM", sliding_window=None)) == [True] * 4
    command = parse("Cohere2ForCausalLM", sliding_window=8, sliding_window_pattern=2)
    assert rotated(command) == [True, False] * 2
    assert command.windows == (8, None) * 2


def test_only_layers_that_see_all_have_scaled_positions() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    long = parse("Olmo3ForCausalLM", rope_scaling=scaling, rope_theta=5e5, max_position_embeddings=65536)
    kinds = [attention.rope.kind if attention.rope else "" for attention in attentions(long)]
    assert kinds == ["default"] * 3 + ["yarn"]
    assert {attention.rope.theta for attention in attentions(long) if attention.rope} == {5e5}
    assert (long.windows, long.max_model_len) == ((4096,) * 3 + (None,), 65536)


def test_ministral_has_usual_positions_of_its_own() -> None:
    decoder = parse("Ministral3ForCausalLM")
    attention = attentions(decoder)[0]
    assert attention.rope is not None
    assert (attention.rope.kind, attention.rope.theta, attention.rope.attention_factor) == ("yarn", 1e6, 1.0)
    assert attention.query_growth is not None
    assert (attention.query_growth.beta, attention.query_growth.length, decoder.max_model_len) == (0.1, 16384, 262144)


def test_an_alpha_stretches_the_base_once() -> None:
    fields = {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "head_dim": 8}
    decoder = parse("HunYuanDenseV1ForCausalLM", max_position_embeddings=262144, **fields)
    rope = attentions(decoder)[0].rope
    assert rope is not None
    assert (rope.kind, decoder.max_model_len) == ("default", 262144)
    assert rope.theta == pytest.approx(10000.0 * 1000.0 ** (8 / 6))


@pytest.mark.parametrize("limit", [float("inf"), {"__float__": "Infinity"}])
def test_infinity_as_transformers_writes_it(limit: Any, tmp_path: Path) -> None:
    """Before version 5 it was no JSON: [0.0, Infinity]."""
    sizes = {"vocab_size": 32, "num_hidden_layers": 2, "hidden_size": 4096}
    raw = {"architectures": ["Mamba2ForCausalLM"], **sizes, "time_step_limit": [0.0, limit]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = parse_model_config(open_checkpoint(tmp_path).config, "own")
    assert isinstance(config, Decoder)
    assert all(isinstance(layer.mixer, Mamba2) and layer.mixer.max_dt is None for layer in config.layers)
