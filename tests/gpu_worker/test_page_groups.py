"""A model whose layers see different windows, with a page group for each: the same tokens as with one group."""

from collections.abc import Callable
from itertools import product

import pytest

from penstock.core.checkpoint.model_config import ModelConfig
from penstock.gpu_worker.startup import start
from penstock.gpu_worker.state.kv_pool import PageGroup, page_groups
from penstock.ipc.messages import SamplingParams
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule

PROMPTS = prompts((1, 45, 17, 64, 133), seed=1)
ROOMY, TIGHT = 3200, 300  # tokens in pages of one group
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


def groups_by_window(model: ModelConfig, page_size: int) -> tuple[PageGroup, ...]:
    """Layers that see everything, then those with a window."""
    (one,) = page_groups(model, page_size)
    layers: dict[int | None, list[int]] = {None: []}
    for i, window in enumerate(model.windows):
        layers.setdefault(window, []).append(i)
    return tuple(one._replace(layers=tuple(of), window=window) for window, of in layers.items())


@pytest.mark.parametrize("name", ["qwen2-some-windows", "qwen3-layer-types"])
@pytest.mark.parametrize(
    ("budget", "page_size", "depth", "cached", "num_tokens"),
    [*product((16, 4096), (1, 16), (1,), (False, True), (TIGHT,)), (64, 4, 0, True, ROOMY), (64, 4, 2, True, TIGHT)],
)
def test_greedy(
    checkpoint: Callable[..., Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    budget: int,
    page_size: int,
    depth: int,
    cached: bool,
    num_tokens: int,
) -> None:
    monkeypatch.setattr(start, "page_groups", groups_by_window)
    folder, model = checkpoint(name)
    options = schedule(budget, page_size, depth, num_tokens=num_tokens, cached=cached)
    engine = Engine(folder, **options, cpu_kernels="torch")
    assert len(engine.hello.window_groups) == 1
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
