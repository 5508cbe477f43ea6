"""A model whose layers see different windows, with a page group for each: the tokens of `transformers`."""

from collections.abc import Callable
from itertools import product

import pytest

from penstock.ipc.messages import SamplingParams
from tests.faults.soak import sized
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule

PROMPTS = prompts((1, 45, 17, 64, 133), seed=1)
ROOMY, TIGHT = 3200, 300  # tokens in pages of one group
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.mark.parametrize(
    ("name", "kernels"),
    sized(
        [("qwen3-layer-types", "native"), ("mistral-window", "torch")],
        list(product(("qwen3-layer-types", "mistral-window"), ("native", "torch"))),
    ),
)
@pytest.mark.parametrize(
    ("budget", "page_size", "depth", "cached", "num_tokens"),
    [*product((16, 4096), (1, 16), (1,), (False, True), (TIGHT,)), (64, 4, 0, True, ROOMY), (64, 4, 2, True, TIGHT)],
)
def test_greedy(
    checkpoint: Callable[..., Checkpoint],
    name: str,
    kernels: str,
    budget: int,
    page_size: int,
    depth: int,
    cached: bool,
    num_tokens: int,
) -> None:
    folder, model = checkpoint(name)
    options = schedule(budget, page_size, depth, num_tokens=num_tokens, cached=cached)
    engine = Engine(folder, **options, cpu_kernels=kernels)
    assert engine.hello.window_groups
    for _ in range(1 + cached):
        outputs = engine.run(PROMPTS, GREEDY, n=2)
        for prompt, (first, second) in zip(PROMPTS, outputs, strict=True):
            assert len(first) == GREEDY.max_tokens
            assert greedy_errors(model, prompt, first)[0] == []
            assert first == second
    stats = engine.scheduler.stats()
    if num_tokens == ROOMY:
        assert stats.num_cached_tokens > sum(map(len, PROMPTS)), "siblings, and all of the second time"
    else:
        assert stats.num_preemptions > 0
