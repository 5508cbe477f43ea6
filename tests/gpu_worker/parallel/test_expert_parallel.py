"""Models whose experts are spread over ranks: the same tokens and log-probabilities as those of transformers."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from penstock.config import ConfigError
from penstock.config.groups.parallel import ParallelOptions
from penstock.ipc.messages import SamplingParams
from penstock.kernels.experts.held_experts import held_experts
from penstock.lab.planning.costs import Costs
from penstock.lab.planning.rank_parts import rank_parts
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.finding.registry import open_checkpoint
from penstock.parts.experts.messages import ExpertTokens, LayerTokens
from penstock.parts.experts.worker import ExpertCounts
from tests.faults.soak import IS_SOAK
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import GREEDY, Scored, texts_of
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.formats.reference import QuantizedReference
from tests.gpu_worker.formats.test_gguf_models import PROMPTS, write_pair
from tests.gpu_worker.formats.test_models_in_formats import FORMATS, case_of
from tests.gpu_worker.parallel.group import Group, GroupEngine, Groups, groups
from tests.gpu_worker.parallel.rank_process import EXPERT_TOKENS
from tests.gpu_worker.parallel.test_tensor_parallel import stays_whole


class Run(NamedTuple):
    """How a family's experts are spread."""

    name: str
    size: int = 2
    kernels: str = "native"
    exchange: str = "auto"
    num_redundant: int = 0


_WITHOUT = ("dense", "kimi")
"""Cases of such families that cannot be spread: without experts, and with five heads."""
_WITH_EXPERTS = [
    name
    for name in CASES
    if any(part in name for part in ("moe", "mixtral", "gpt_oss", "deepseek", "llama4", "gemma4-26b", "minimax"))
    and not any(part in name for part in _WITHOUT)
]
USUAL = (
    Run("mixtral"),
    Run("mixtral", kernels="torch", exchange="all-to-all", num_redundant=3),
    Run("qwen3_moe", kernels="torch"),
    Run("qwen3_moe", 4, num_redundant=4),
    Run("deepseek_v3", num_redundant=1),
    Run("deepseek_v3", kernels="torch", exchange="all-to-all"),
    Run("gpt_oss", num_redundant=2),
    Run("gpt_oss", kernels="torch", exchange="all-to-all"),
    Run("gemma4-26b", kernels="torch"),
    Run("llama4", kernels="torch", exchange="all-to-all"),
)
ALL = [
    Run(name, size, kernels, exchange, num_redundant)
    for name in _WITH_EXPERTS
    for size in (2, 4)
    for kernels, exchange in (("native", "auto"), ("torch", "all-reduce"), ("torch", "all-to-all"))
    for num_redundant in (0, 3)
    if exchange != "all-to-all" or "gemma4" not in name
]
CHECKED = ALL if IS_SOAK else USUAL


@pytest.fixture(scope="module")
def ranks() -> Iterator[Groups]:
    with groups() as found:
        yield found


def spread_engine(folder: Path, group: Group, size: int, **options: Any) -> GroupEngine:
    return GroupEngine(folder, group=group, tensor_parallel_size=size, enable_expert_parallel=True, **options)


@pytest.mark.parametrize("run", CHECKED, ids=lambda run: "-".join(map(str, run)))
def test_family(tmp_path: Path, run: Run, ranks: Groups) -> None:
    reference = Reference(tmp_path, CASES[run.name])
    if stays_whole(tmp_path, run.size):
        return
    group = ranks.of(run.size)
    engine = spread_engine(
        tmp_path, group, run.size,
        cpu_kernels=run.kernels, expert_exchange=run.exchange, num_redundant_experts=run.num_redundant,
    )  # fmt: skip
    # A norm over the heads of all ranks is computed by torch's kernels.
    assert engine.hello.kernels == ("torch" if "minimax" in run.name else run.kernels)
    texts = texts_of(reference.case)
    for text, answer in zip(texts, engine.answers(texts, GREEDY), strict=True):
        assert not reference.errors(text, answer)


QUANTIZED = {"mxfp4-gpt-oss": "native", "gptq-mixtral": "native", "fp8-qwen3-moe": "torch", "awq-qwen3-moe": "torch"}
USUALLY_QUANTIZED = {"mxfp4-gpt-oss", "fp8-qwen3-moe"}


@pytest.mark.parametrize("name", QUANTIZED if IS_SOAK else sorted(USUALLY_QUANTIZED))
def test_quantized(tmp_path: Path, name: str, ranks: Groups) -> None:
    """Tensors of all experts, and those of each by itself."""
    write, case = FORMATS[name]
    reference = QuantizedReference(tmp_path, case_of(case, write()), write())
    engine = spread_engine(reference.folder, ranks.of(2), 2, cpu_kernels=QUANTIZED[name], num_redundant_experts=1)
    texts = texts_of(reference.case)
    for text, answer in zip(texts, engine.answers(texts, GREEDY), strict=True):
        assert not reference.errors(text, answer)


def test_gguf(tmp_path: Path, ranks: Groups) -> None:
    kinds = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "token_embd", "output"), "Q8_0")
    kinds |= {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "Q4_0"}
    quantized, _ = write_pair(tmp_path, kinds, num_experts=4)
    alone = Scored(quantized).answers(PROMPTS, GREEDY)
    engine = spread_engine(quantized, ranks.of(2), 2, num_redundant_experts=1)
    assert [answer.tokens for answer in engine.answers(PROMPTS, GREEDY)] == [answer.tokens for answer in alone]


def test_drawn_tokens(tmp_path: Path, ranks: Groups) -> None:
    """Each rank draws by itself, and the single worker draws the same."""
    reference = Reference(tmp_path, CASES["mixtral"])
    texts = texts_of(reference.case)
    drawn = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=7)
    alone = Scored(tmp_path).answers(texts, drawn)
    for exchange in ("all-reduce", "all-to-all"):
        engine = spread_engine(tmp_path, ranks.of(2), 2, cpu_kernels="torch", expert_exchange=exchange)
        assert [answer.tokens for answer in engine.answers(texts, drawn)] == [answer.tokens for answer in alone]


@pytest.mark.parametrize(
    ("kernels", "exchange"), [("native", "auto"), ("torch", "all-reduce"), ("torch", "all-to-all")]
)
def test_tokens_are_counted(tmp_path: Path, kernels: str, exchange: str, ranks: Groups) -> None:
    """As many for each expert as transformers' router says."""
    reference, group = Reference(tmp_path, CASES["mixtral"]), ranks.of(2)
    engine = spread_engine(
        tmp_path, group, 2, cpu_kernels=kernels, expert_exchange=exchange, num_redundant_experts=3,
        enable_prefix_caching=False,
    )  # fmt: skip
    texts = texts_of(reference.case)
    answers = engine.answers(texts, GREEDY)
    expected: dict[int, Counter[int]] = {}
    with torch.inference_mode():
        for text, answer in zip(texts, answers, strict=True):
            logits = reference.model(torch.tensor([text + answer.tokens[:-1]]), output_router_logits=True).router_logits
            for number, its in enumerate(logits):
                expected.setdefault(number, Counter()).update(its.topk(2).indices.flatten().tolist())
    found: dict[int, Counter[int]] = {}
    told = [message for message in group.ask(EXPERT_TOKENS) if isinstance(message, ExpertTokens)]
    for layer in (layer for message in told for layer in message.layers):
        found.setdefault(layer.layer, Counter()).update(layer.tokens)
    assert found == expected
    assert all(sum(sum(layer.tokens.values()) for layer in message.layers) for message in told)
    assert group.ask(EXPERT_TOKENS) == [None, None], "there is nothing new"


def test_tokens_before_the_first_request_do_not_count() -> None:
    """Those of the warm-up are all alike, and would make a few experts look busy."""
    held = held_experts(0, [[0], [1], [0]], torch.device("cpu"))
    ids, turns = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    held.counted(ids, turns)
    counts = ExpertCounts({5: held})
    assert counts.take() is None
    held.counted(ids, turns)
    assert counts.take() == ExpertTokens((LayerTokens(5, 3, {0: 2, 2: 1}),))


def test_placed_by_measured_loads(tmp_path: Path, ranks: Groups) -> None:
    """A file of loads changes which rank reads which experts, and no token."""
    reference, group = Reference(tmp_path, CASES["mixtral"]), ranks.of(2)
    texts = texts_of(reference.case)
    load = tmp_path / "load.json"
    load.write_text('{"layers": {"0": [9000, 9000, 9000, 9000, 1, 1, 1, 1]}}')
    engine = spread_engine(tmp_path, group, 2, expert_load=str(load), num_redundant_experts=2)
    for text, answer in zip(texts, engine.answers(texts, GREEDY), strict=True):
        assert not reference.errors(text, answer)
    assert len({report.hello.placement for report in group.reports}) == 1


@pytest.mark.parametrize("num_redundant", [0, 2])
def test_a_rank_reads_no_tensors_of_others(tmp_path: Path, num_redundant: int, ranks: Groups) -> None:
    Reference(tmp_path, CASES["mixtral"])
    group = ranks.of(2)
    spread_engine(tmp_path, group, 2, num_redundant_experts=num_redundant, cpu_kernels="torch")
    stored = load_file(tmp_path / "model.safetensors")
    of_expert = sum(its.nbytes for name, its in stored.items() if ".experts." in name) // 8
    whole = sum(its.nbytes for name, its in stored.items() if "norm" in name or ".gate." in name)
    split = sum(its.nbytes for its in stored.values()) - 8 * of_expert - whole
    held = (8 + num_redundant) // 2
    found = [report.bytes_read for report in group.reports]
    assert sum(found) == 2 * (held * of_expert + whole) + split
    assert max(found) - min(found) < of_expert, "they have as many experts, and about as large a part of the vocabulary"
    decoder = parse_model_config(open_checkpoint(tmp_path).config)
    assert isinstance(decoder, Decoder)
    options = ParallelOptions(tensor_parallel_size=2, enable_expert_parallel=True, num_redundant_experts=num_redundant)
    (planned,) = rank_parts(Costs(decoder, "fp32", "fp32"), options)
    assert planned.weight_bytes == max(found)


def test_refused(tmp_path: Path, ranks: Groups) -> None:
    Reference(tmp_path, CASES["mixtral"])
    with pytest.raises(ConfigError, match="--cpu-kernels torch"):
        spread_engine(tmp_path, ranks.of(2), 2, expert_exchange="all-to-all", cpu_kernels="native")
