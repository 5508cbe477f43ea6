"""Seeded rows with samplers draw the same tokens in every batch, with drafts and after preemptions."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.ipc.messages import SamplerUse, SamplingParams
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.parts.drafts.lengths import drafting_of
from tests.parts.drafts.worker.drafters import DRAFTERS, Always, speculative

Make = Callable[..., Checkpoint]

NUM_NEW = 24
PROMPTS = [*prompts((1, 45, 17, 64), seed=1), prompts((19,), seed=2)[0] * 7, *prompts((30,), seed=3)]
USES = (
    (SamplerUse("dry", (0.8, 1.75, 1, 0)), SamplerUse("xtc", (0.5, 0.01))),
    (SamplerUse("penalties", (1.1, 0.2, 0.1)), SamplerUse("typical_p", (0.7,)), SamplerUse("temperature", (1.3,))),
    (),
    (SamplerUse("dynamic_temperature", (0.2, 1.5, 1.0)), SamplerUse("dry", (2.0, 1.75, 2, 0, 5))),
    (SamplerUse("mirostat", (2, 3.0, 0.7)),),
    (SamplerUse("temperature", (1.3,)), SamplerUse("mirostat", (1, 2.0, 0.9))),
)
SAMPLING = [SamplingParams(max_tokens=NUM_NEW, seed=i, samplers=uses) for i, uses in enumerate(USES)]


@pytest.fixture(scope="module")
def alone(checkpoint: Make) -> list[list[list[int]]]:
    engine = Engine(checkpoint("llama")[0], **schedule(4096, 16, 0, num_tokens=3200))
    found = [engine.run([prompt], params, n=2)[0] for prompt, params in zip(PROMPTS, SAMPLING, strict=True)]
    plain = [SamplingParams(max_tokens=NUM_NEW, seed=i) for i in range(len(SAMPLING))]
    others = engine.run(PROMPTS, plain, n=2)
    assert [a == b for a, b in zip(found, others, strict=True)] == [not params.samplers for params in SAMPLING]
    return found


@pytest.mark.parametrize(
    ("budget", "page_size", "depth", "is_tight", "kernels"),
    [(16, 4, 1, True, "native"), (4096, 16, 2, False, "torch"), (4096, 16, 1, False, "native")],
)
def test_in_every_schedule(
    checkpoint: Make,
    alone: list[list[list[int]]],
    budget: int,
    page_size: int,
    depth: int,
    is_tight: bool,
    kernels: str,
) -> None:
    options = schedule(budget, page_size, depth, num_tokens=180 if is_tight else 3200, cached=is_tight)
    engine = Engine(checkpoint("llama")[0], cpu_kernels=kernels, **options)
    assert engine.run(PROMPTS, SAMPLING, n=2) == alone
    if is_tight:
        assert engine.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_with_drafts(checkpoint: Make, alone: list[list[list[int]]], tmp_path: Path, name: str) -> None:
    folder, model = checkpoint("llama")
    engine = Engine(
        folder, speculative_config=speculative(name, model, tmp_path), **schedule(4096, 16, 1, num_tokens=3200)
    )
    always = Always(engine.hello.max_drafts)
    drafting_of(engine.scheduler).lengths = always
    assert engine.run(PROMPTS, SAMPLING, n=2) == alone
    assert always.num_guessed > 0 or name == "suffix"  # finds nothing to repeat


def test_what_a_sampler_keeps_comes_along(checkpoint: Make) -> None:
    """After preemptions, of which each sequence has some."""
    folder = checkpoint("llama")[0]
    kept = [SamplingParams(max_tokens=NUM_NEW, seed=i, samplers=USES[4 + i % 2]) for i in range(len(PROMPTS))]
    expected = Engine(folder, **schedule(4096, 16, 0, num_tokens=3200)).run(PROMPTS, kept, n=2)
    engine = Engine(folder, **schedule(16, 4, 1, num_tokens=180, cached=True))
    assert engine.run(PROMPTS, kept, n=2) == expected
    assert engine.scheduler.stats().num_preemptions > 0
