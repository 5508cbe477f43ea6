"""Rows with adapters verify what is drafted, whoever drafts it: they say what they say without drafts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.parts.drafts.scheduler.lengths import FixedLengths
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint, checkpoint, one_thread
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.parts.adapters.test_parity import assert_greedy, load, run
from tests.parts.adapters.written import write_adapter
from tests.parts.drafts.lengths import drafting_of
from tests.parts.drafts.worker.drafters import speculative

__all__ = ["checkpoint", "one_thread"]
Make = Callable[..., Checkpoint]
[TEXT] = prompts((6,), seed=7)
PROMPTS = [TEXT * 3, TEXT * 2 + TEXT[:3], TEXT[:2]]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", ["ngram", "draft_model", "eagle"])
def test_what_is_verified_is_the_adapters(checkpoint: Make, tmp_path: Path, name: str, kernels: str) -> None:
    """Beside rows of the model and of another adapter, in one slot each."""
    folder, model = checkpoint("llama")
    options = schedule(24, 16, 1, num_tokens=800) | {"cpu_kernels": kernels, "max_loras": 2}
    engine = Engine(folder, speculative_config=speculative(name, model, tmp_path), **options)
    drafting_of(engine.scheduler).lengths = FixedLengths(engine.hello.max_drafts)
    merged = {"": model}
    for rank in (3, 16):
        its = write_adapter(tmp_path / f"{rank}", model, rank, seed=rank)
        merged[load(engine, f"{rank}", tmp_path / f"{rank}")] = its
    asks = [(prompt, key) for prompt in PROMPTS for key in merged]
    for (prompt, key), output in zip(asks, run(engine, asks), strict=True):
        assert_greedy(merged[key], prompt, output)
    drafts = engine.scheduler.stats().drafts
    assert drafts is not None
    assert drafts.num_guessed > 0
