"""What engines on a GPU can be asked for: quantized pages and weights, mixtures, a host tier, drafts, grammars.

The judge is the same engine on the CPU, with torch's kernels and in fp32. It reads each answer as a prompt, and scores
its tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from penstock.gpu_worker.state import transfers
from penstock.gpu_worker.steps.host_step import PendingStep
from penstock.ipc.messages import Pooling, SamplingParams, StepPlan
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import Scored
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.formats import writers
from tests.gpu_worker.formats.reference import QuantizedReference
from tests.gpu_worker.formats.writers import Writer
from tests.parts.drafts.lengths import drafting_of
from tests.parts.drafts.worker.drafters import DRAFTERS, Always, speculative
from tests.parts.host.test_host_moves import totals_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

Make = Callable[..., Checkpoint]

DEVICE = "cuda"
NUM_NEW = 12
PROMPTS = prompts((1, 45, 17, 64, 133), seed=1)
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
SCORED = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, num_logprobs=0)
SEEDED = SamplingParams(max_tokens=NUM_NEW, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11)
GIB = 2**-8  # of the host: 4 MiB


class Bound(NamedTuple):
    """How far log-probabilities may be from the judge's."""

    median: float
    most: float


EXACT = Bound(1e-4, 2e-3)
"""In fp32."""
CODES = Bound(2e-3, 0.1)
"""In fp32 where a number may be rounded to the next code of 4 or 8 bits, because a sum has another order."""
FEW_BITS = Bound(0.1, 1.0)
"""In fp32 where that code has 4 significant bits, and a tensor core adds up with 14 bits."""
BF16 = Bound(0.06, 1.0)


@pytest.fixture(autouse=True)
def compiled_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of the kernels that a start compiles are used here."""
    monkeypatch.setattr("penstock.gpu_worker.startup.start.warm_up", lambda runner, limits: 0)


def check(folder: Path, bound: Bound, dtype: str = "float32", **options: Any) -> None:
    """Chunks beside decodes, and graphs with padded rows. Each token must be the best one, as near as `bound` says."""
    shape = schedule(64, 16, 1, num_tokens=6400) | {"max_num_seqs": 6}
    engine = Scored(folder, device=DEVICE, dtype=dtype, **shape | options)
    answers = engine.answers(PROMPTS, SCORED)
    judge = Engine(folder, cpu_kernels="torch", dtype="float32", **options)
    texts = [prompt + answer.tokens for prompt, answer in zip(PROMPTS, answers, strict=True)]
    judge.run(texts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    errors = []
    for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        scores = judge.last_delta[f"r{i}", 0].prompt_logprobs
        assert scores is not None
        its, best = np.frombuffer(scores.logprobs, np.float32).reshape(-1, 2)[len(prompt) - 1 :].T
        errors.append(np.maximum(np.abs(its - answer.logprobs), best - its))
    together = np.concatenate(errors)
    assert together.shape == (NUM_NEW * len(PROMPTS),)
    assert np.median(together) <= bound.median
    assert together.max() <= bound.most


@pytest.mark.parametrize("kv", ["fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_quantized_pages(checkpoint: Make, kv: str) -> None:
    check(checkpoint("qwen3")[0], CODES, kv_cache_dtype=kv)


@pytest.mark.parametrize(
    ("quantization", "bound"),
    [("int4", EXACT), ("int8_weight_only", EXACT), ("int8", CODES), ("fp8", FEW_BITS)],
)
def test_weights_quantized_as_they_are_read(checkpoint: Make, quantization: str, bound: Bound) -> None:
    check(checkpoint("llama")[0], bound, quantization=quantization)


@pytest.mark.parametrize(
    ("write", "case", "bound"),
    [
        (lambda: writers.gptq(4, 32), "llama", EXACT),
        (lambda: writers.gptq(4, 32, has_order=True), "llama", EXACT),
        (lambda: writers.gptq(4, 32), "mixtral", EXACT),
        (writers.nf4, "llama", EXACT),
        (writers.mxfp4, "gpt_oss", EXACT),
        (lambda: writers.fp8(32), "llama", FEW_BITS),
    ],
    ids=["gptq", "gptq-order", "gptq-mixtral", "nf4", "mxfp4-gpt-oss", "fp8-blocks"],
)
def test_quantized_checkpoints(write: Callable[[], Writer], case: str, bound: Bound, tmp_path: Path) -> None:
    folder = QuantizedReference(tmp_path, CASES[case], write()).folder
    check(folder, bound, max_model_len=320)


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v2-lite"])
def test_mixtures_in_bf16(case: str, tmp_path: Path) -> None:
    check(Reference(tmp_path, CASES[case]).folder, BF16, "bfloat16", max_model_len=320)


def test_gptq_in_bf16(tmp_path: Path) -> None:
    """Codes stay what they are; the rest is rounded."""
    folder = QuantizedReference(tmp_path, CASES["llama"], writers.gptq(4, 32)).folder
    check(folder, BF16, "bfloat16", max_model_len=320)


@pytest.mark.parametrize(("kv", "depth", "kind"), [("auto", 0, "swap"), ("auto", 2, "auto"), ("int8", 1, "swap")])
def test_the_host_tier(checkpoint: Make, monkeypatch: pytest.MonkeyPatch, kv: str, depth: int, kind: str) -> None:
    """A pool that is too small; all of it twice, the second time with prefixes from the host. Slots are used anew."""
    folder, model = checkpoint("qwen3")
    monkeypatch.setattr(transfers, "_SLOT_BYTES", 1 << 14)
    options = schedule(64, 16, depth, num_tokens=133 + NUM_NEW + 20, cached=True) | {"kv_cache_dtype": kv}
    shape = {"device": DEVICE, "dtype": "float32", "max_num_seqs": 6}
    asked = [*[GREEDY] * len(PROMPTS), SEEDED]
    expected = Engine(folder, **shape, **options | {"num_pages": 400}).run([*PROMPTS, PROMPTS[1]], asked, n=2)
    engine = Engine(folder, **shape, **options, preemption=kind, host_kv_gib=GIB)
    assert engine.hello.num_host_pages > 0
    for _ in range(2):
        assert engine.run([*PROMPTS, PROMPTS[1]], asked, n=2) == expected
    if kv == "auto":
        for prompt, (first, _) in zip(PROMPTS, expected, strict=False):
            assert greedy_errors(model, prompt, first)[0] == []
    totals, tiers = engine.scheduler.totals, totals_of(engine.scheduler)
    assert totals.num_preemptions > 0
    assert tiers.num_promoted_pages > 0
    assert kind == "auto" or tiers.num_swapped_in == totals.num_preemptions


@pytest.mark.parametrize("name", ["ngram", "draft_model", "eagle3", "medusa, tree"])
def test_drafts(checkpoint: Make, tmp_path: Path, name: str) -> None:
    """Guesses that are checked on the GPU, and made on the host or by graphs of their own; chunks beside them."""
    folder, model = checkpoint("llama")
    texts = [*prompts((3, 45, 17), seed=1), prompts((19,), seed=2)[0] * 5]
    options = schedule(64, 16, 2, num_tokens=3200) | {"device": DEVICE, "dtype": "float32", "max_num_seqs": 6}
    asked = [GREEDY, SEEDED, GREEDY, GREEDY]
    expected = Engine(folder, **options).run(texts, asked)
    engine = Engine(folder, speculative_config=speculative(name, model, tmp_path / "draft"), **options)
    always = drafting_of(engine.scheduler).lengths = Always(engine.hello.max_drafts)
    assert engine.run(texts, asked) == expected
    for i in (0, 2, 3):
        assert greedy_errors(model, texts[i], expected[i][0])[0] == []
    assert always.num_guessed > always.num_right
    assert always.num_right or not DRAFTERS[name].is_right


@pytest.mark.parametrize("depth", [0, 2])
def test_grammars_beside_free_rows(tmp_path: Path, depth: int) -> None:
    """Masks are filled in a thread that waits for the tokens of the step before."""
    for package in ("llguidance", "jsonschema", "tokenizers"):
        pytest.importorskip(package)
    from tests.gpu_worker.world import EOS, PROMPT, World  # needs packages that other tests do without

    world = World(tmp_path)
    few: dict[str, Any] = {"max_tokens": 60}
    asked = [
        world.params("regex", "([a-z]{3,9};){2,4}[0-9]{4,9}", seed=3, **few),
        SEEDED,
        world.params("choice", ["yes", "no, never"], temperature=0.0, **few),
        world.params("json", {"enum": ["a", 7, {"x": None}]}, seed=5, **few),
    ]
    options = schedule(64, 16, depth, num_tokens=3200) | {"dtype": "float32", "max_num_seqs": 6}
    found = Engine(tmp_path, device=DEVICE, **options).run([PROMPT] * len(asked), asked)
    assert found == Engine(tmp_path, device="cpu", cpu_kernels="torch", **options).run([PROMPT] * len(asked), asked)
    assert world.text(found[2][0]) in ("yes", "no, never")
    assert found[3][0][-1] == EOS


def test_an_engine_leaves_its_memory_to_the_next_one(checkpoint: Make) -> None:
    """Its pool, its graphs and its host tier: three engines one after the other, in one process."""
    folder, _ = checkpoint("llama")
    options = schedule(64, 16, 1, num_tokens=32000, cached=True) | {"max_num_seqs": 6, "host_kv_gib": 0.1}
    found, left = [], []
    for _ in range(3):
        engine = Engine(folder, device=DEVICE, dtype="float32", **options)
        assert engine.hello.num_host_pages > 0
        found.append(engine.run(PROMPTS, SEEDED))
        del engine
        torch.cuda.synchronize()
        left.append(torch.cuda.memory_allocated())
    assert found[1] == found[2] == found[0]
    assert left[2] <= left[0] + (1 << 20)


ALL_KINDS = (
    GREEDY,
    SEEDED,
    replace(SEEDED, top_k=7, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.3),
    replace(SEEDED, num_logprobs=3, prompt_logprobs=2),
    replace(SEEDED, logit_bias=((5, 2.0), (9, -3.0)), min_tokens=6, stop_token_ids=(7,), bad_words=((3, 4), (11,))),
    replace(GREEDY, allowed_token_ids=(5, 8, 13, 21)),
    replace(GREEDY, max_tokens=1, pooling=Pooling("mean")),
    replace(GREEDY, max_tokens=1, pooling=Pooling("last", 24)),
)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-layer-types", "llama-dynamic"])
@pytest.mark.parametrize("drafts", ["", '{"method": "ngram", "num_speculative_tokens": 3}'])
def test_launching_a_step_does_not_wait_unasked(checkpoint: Make, name: str, drafts: str) -> None:
    """Rows of all kinds come and go. torch raises an error where it would wait, except for an event.

    Steps with drafts wait for tokens by events.
    """
    options = schedule(64, 16, 2, num_tokens=3200, cached=True) | {"speculative_config": drafts}
    engine = Engine(checkpoint(name)[0], device=DEVICE, dtype="float32", max_num_seqs=6, **options)
    launch = engine.runner.launch

    def strict(plan: StepPlan) -> PendingStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.launch = strict  # type: ignore[method-assign, assignment]
    texts = [PROMPTS[i % len(PROMPTS)] for i in range(len(ALL_KINDS))]
    for _ in range(2):
        for params, (output,) in zip(ALL_KINDS, engine.run(texts, ALL_KINDS), strict=True):
            assert len(output) == (0 if params.pooling else NUM_NEW)
