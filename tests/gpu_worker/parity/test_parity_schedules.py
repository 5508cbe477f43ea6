"""Tokens do not depend on the schedule: every combination of budget, page size, depth, prefix cache and pool size.

By default for one checkpoint; with PENSTOCK_TEST_CHECKPOINTS=all for every architecture and kind of rotary embedding.
"""

import os
from collections.abc import Callable
from itertools import product

import pytest
from msgspec.structs import replace

from penstock.ipc.messages import SamplingParams
from tests.gpu_worker.checkpoints import CONFIGS, greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule

Make = Callable[..., Checkpoint]

NAMES = list(CONFIGS) if os.environ.get("PENSTOCK_TEST_CHECKPOINTS") == "all" else ["llama"]

NUM_NEW = 24
PROMPTS = prompts((1, 45, 17, 64, 133), seed=1)
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
GREEDY_IDX = (1, 4)
ROOMY, TIGHT = 3200, 133 + NUM_NEW + 20  # tokens in the pool; five prompts, two sequences each, ask for about 700
SAMPLING = (
    SamplingParams(max_tokens=NUM_NEW, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11),
    GREEDY,
    SamplingParams(max_tokens=NUM_NEW, temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=2**62 + 1),
    SamplingParams(
        max_tokens=NUM_NEW,
        temperature=1.3,
        min_p=0.02,
        frequency_penalty=0.3,
        logit_bias=((5, 2.0), (9, -3.0)),
        seed=7,
    ),
    GREEDY,
)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """The checkpoint's kind."""
    return str(request.param)


@pytest.fixture(scope="module")
def seeded_alone(checkpoint: Make, name: str) -> list[list[list[int]]]:
    """What the seeded prompts give one by one at depth 0: two sequences each, with seeds s and s + 1."""
    engine = Engine(checkpoint(name)[0], **schedule(4096, 16, 0, num_tokens=ROOMY))
    alone = []
    for prompt, params in zip(PROMPTS, SAMPLING, strict=True):
        seeds = () if params is GREEDY else (params.seed, params.seed + 1)
        alone.append([engine.run([prompt], replace(params, seed=seed))[0][0] for seed in seeds])
    assert all(outputs[0] != outputs[1] for outputs in alone if outputs)
    return alone


@pytest.mark.parametrize(
    ("budget", "page_size", "depth", "cached", "is_tight"),
    list(product((16, 4096), (1, 16, 64), (0, 1, 2), (False, True), (False, True))),
)
def test_greedy_and_seeded(
    checkpoint: Make,
    name: str,
    seeded_alone: list[list[list[int]]],
    budget: int,
    page_size: int,
    depth: int,
    cached: bool,
    is_tight: bool,
) -> None:
    """Some prompts greedy and some seeded in one batch, two sequences each; with a cache, all of it twice."""
    folder, model = checkpoint(name)
    num_tokens = TIGHT if is_tight else ROOMY
    engine = Engine(folder, **schedule(budget, page_size, depth, num_tokens=num_tokens, cached=cached))
    for is_repeated in (False, True) if cached else (False,):
        num_cached_before = engine.scheduler.stats().num_cached_tokens
        outputs = engine.run(PROMPTS, SAMPLING, n=2)
        for i, sequences in enumerate(outputs):
            if i in GREEDY_IDX:
                assert sequences[0] == sequences[1]
                assert greedy_errors(model, PROMPTS[i], sequences[0])[0] == []
            else:
                assert sequences == seeded_alone[i]
        if is_repeated and not is_tight:
            num_hits = engine.scheduler.stats().num_cached_tokens - num_cached_before
            assert num_hits >= sum(2 * ((len(prompt) - 1) // page_size * page_size) for prompt in PROMPTS)
    if is_tight:
        assert engine.scheduler.stats().num_preemptions > 0
    if not cached:
        assert engine.scheduler.stats().num_cached_pages == 0
