"""With drafts, tokens are those of plain decoding: every drafter, in every schedule.

By default each value of an option meets each drafter; with PENSTOCK_SOAK=1 each combination does.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.ipc.messages import SamplingParams
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from tests.faults.soak import IS_SOAK
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.parts.drafts.lengths import drafting_of
from tests.parts.drafts.worker.drafters import DRAFTERS, Always, speculative

Make = Callable[..., Checkpoint]

NUM_NEW = 32
PROMPTS = [*prompts((1, 45, 17, 64), seed=1), prompts((19,), seed=2)[0] * 7, *prompts((30,), seed=3)]
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
GREEDY_IDX = (1, 4)
SAMPLING = (
    SamplingParams(max_tokens=NUM_NEW, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11),
    GREEDY,
    SamplingParams(max_tokens=NUM_NEW, temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=2**62 + 1),
    SamplingParams(max_tokens=NUM_NEW, temperature=0.3, min_p=0.02, logit_bias=((5, 2.0), (9, -3.0)), seed=7),
    GREEDY,
    SamplingParams(max_tokens=NUM_NEW, temperature=1.3, min_tokens=9, stop_token_ids=tuple(range(8)), seed=5),
)
ROOMY, TIGHT = 3200, 133 + NUM_NEW + 20  # tokens in the pool

Schedule = tuple[int, int, int, bool, bool, str]
"""Budget, page size, depth, whether prefixes are cached, whether the pool is tight, kernels."""

WHOLE: list[Schedule] = list(
    product((16, 4096), (1, 16, 64), (0, 1, 2), (False, True), (False, True), ("native", "torch"))
)
PAIRWISE: list[Schedule] = [
    (4096, 16, 1, False, False, "native"),
    (16, 1, 0, True, True, "native"),
    (16, 64, 1, True, False, "torch"),
    (4096, 1, 2, True, False, "native"),
    (16, 16, 2, False, True, "torch"),
    (4096, 64, 0, False, True, "native"),
    (40, 4, 2, True, True, "torch"),
    (48, 4, 1, True, True, "native"),
]


@pytest.fixture(scope="module")
def plain(checkpoint: Make) -> list[list[list[int]]]:
    """Without drafts, one by one: two sequences each. Greedy ones are transformers'."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, **schedule(4096, 16, 0, num_tokens=ROOMY))
    texts = [engine.run([prompt], params, n=2)[0] for prompt, params in zip(PROMPTS, SAMPLING, strict=True)]
    for i in GREEDY_IDX:
        assert greedy_errors(model, PROMPTS[i], texts[i][0])[0] == []
    return texts


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("each", WHOLE if IS_SOAK else PAIRWISE, ids=str)
@pytest.mark.parametrize("is_always", [True, False] if IS_SOAK else [True])
def test_tokens_are_those_of_plain_decoding(
    checkpoint: Make, plain: list[list[list[int]]], tmp_path: Path, name: str, each: Schedule, is_always: bool
) -> None:
    """Greedy and seeded together, two sequences each; with a cache, all of it twice."""
    budget, page_size, depth, cached, is_tight, kernels = each
    folder, model = checkpoint("llama")
    options = schedule(budget, page_size, depth, num_tokens=TIGHT if is_tight else ROOMY, cached=cached)
    options |= {"cpu_kernels": kernels}
    engine = Engine(folder, speculative_config=speculative(name, model, tmp_path), **options)
    always = Always(engine.hello.max_drafts)
    if is_always:
        drafting_of(engine.scheduler).lengths = always
    for _ in range(1 + cached):
        assert engine.run(PROMPTS, SAMPLING, n=2) == plain
    if is_always and not is_tight:
        assert always.num_guessed > always.num_right, "some are wrong"
        assert always.num_right or not DRAFTERS[name].is_right
    if is_tight and page_size < 64:  # three of these pages hold one sequence at a time
        assert engine.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_logprobs_are_those_of_plain_decoding(checkpoint: Make, tmp_path: Path, name: str, kernels: str) -> None:
    folder, model = checkpoint("llama")
    options = schedule(64, 16, 1, num_tokens=ROOMY) | {"cpu_kernels": kernels}
    sampling = [replace(params, num_logprobs=3, prompt_logprobs=1) for params in SAMPLING]
    expected = Engine(folder, **options).run(PROMPTS, sampling)
    engine = Engine(folder, speculative_config=speculative(name, model, tmp_path), **options)
    drafting_of(engine.scheduler).lengths = FixedLengths(engine.hello.max_drafts)
    assert engine.run(PROMPTS, sampling) == expected
