"""A pool that is too small, with pages on the host: tokens are those of `transformers`, however sequences come back.

Any two settings meet by default, all combinations in soak.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.ipc.messages import SamplingParams
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, make_config, schedule
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import check
from tests.gpu_worker.families.schedules import Schedule
from tests.gpu_worker.families.table import CASES
from tests.kernels.pairs import every
from tests.parts.host.test_host_moves import totals_of

PROMPTS = prompts((1, 45, 17, 64, 133), seed=1)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11)
GIB = 2**-8  # of the host: 4 MiB


@pytest.mark.parametrize(
    ("kind", "name", "cached", "depth", "page_size", "kernels", "gib"),
    every(
        ("recompute", "swap", "auto"),
        ("llama", "qwen3-layer-types"),
        (False, True),
        (0, 1, 2),
        (1, 16),
        ("native", "torch"),
        (GIB, GIB / 64),
    ),
)
def test_tokens_do_not_depend_on_tiers(
    checkpoint: Callable[..., Checkpoint],
    kind: str,
    name: str,
    cached: bool,
    depth: int,
    page_size: int,
    kernels: str,
    gib: float,
) -> None:
    """Greedy prompts and a seeded one, two sequences each, so that they fork; with a cache, all of it twice."""
    folder, model = checkpoint(name)
    num_tokens = 300 if name == "qwen3-layer-types" else 133 + GREEDY.max_tokens + 20
    options = schedule(64, page_size, depth, num_tokens=num_tokens, cached=cached) | {"cpu_kernels": kernels}
    engine = Engine(folder, **options, preemption=kind, host_kv_gib=gib)
    roomy = Engine(folder, **options | {"num_pages": 3200})
    seeded = roomy.run([PROMPTS[1]], SEEDED, n=2)[0]
    for _ in range(1 + cached):
        outputs = engine.run([*PROMPTS, PROMPTS[1]], [*[GREEDY] * len(PROMPTS), SEEDED], n=2)
        assert outputs.pop() == seeded
        for prompt, (first, second) in zip(PROMPTS, outputs, strict=True):
            assert len(first) == GREEDY.max_tokens
            assert greedy_errors(model, prompt, first)[0] == []
            assert first == second
    scheduler = engine.scheduler
    assert scheduler.totals.num_preemptions > 0
    assert scheduler.kv.tiers is not None
    assert scheduler.kv.tiers.host.num_held == 0
    if kind == "swap" and gib == GIB:
        assert totals_of(scheduler).num_swapped_in == scheduler.totals.num_preemptions
    if cached and gib == GIB:
        assert totals_of(scheduler).num_promoted_pages > 0


@pytest.mark.parametrize(
    ("name", "kind", "run"),
    [
        ("deepseek_v3", "swap", Schedule(24, 4, 1, True, True, True)),
        ("gemma3", "swap", Schedule(24, 4, 2, True, True, True)),
        ("gpt_oss", "auto", Schedule(8, 4, 1, True, True, True)),
        ("deepseek_v2-lite", "recompute", Schedule(24, 1, 0, True, True, True)),
    ],
)
def test_families_with_windows_and_latents(tmp_path: Path, name: str, kind: str, run: Schedule) -> None:
    check(Reference(tmp_path, CASES[name]), run, cpu_kernels="native", preemption=kind, host_kv_gib=GIB)


def test_a_tier_without_memory_is_left_out(checkpoint: Callable[..., Checkpoint]) -> None:
    folder, model = checkpoint("llama")
    options = schedule(64, 16, 1, num_tokens=180)
    engine = Engine(folder, **options, preemption="swap", host_kv_gib=1e9)
    assert engine.hello.failed_tiers == ("host",)
    assert engine.hello.num_host_pages == 0
    for prompt, (output,) in zip(PROMPTS, engine.run(PROMPTS, GREEDY), strict=True):
        assert greedy_errors(model, prompt, output)[0] == []


def test_swapping_needs_the_tier(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host_kv_gib"):
        make_config(tmp_path, preemption="swap")
