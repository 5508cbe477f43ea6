"""The real worker verifies drafts: whatever is guessed, the tokens are those of the plain run."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.drafts import Drafter
from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.drafts import Drafts
from penstock.gpu_worker.steps.host_step import host_batch
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import RowError, SamplingParams, StepPlan, StepResult
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule

Make = Callable[..., Checkpoint]
NUM_NEW = 24
PROMPTS = prompts((1, 45, 17, 64), seed=1)
SAMPLING = (
    SamplingParams(max_tokens=NUM_NEW, temperature=0.0),
    SamplingParams(max_tokens=NUM_NEW, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11),
    SamplingParams(max_tokens=NUM_NEW, repetition_penalty=1.2, frequency_penalty=0.3, seed=2**62 + 1),
    SamplingParams(max_tokens=NUM_NEW, temperature=1.3, min_tokens=9, stop_token_ids=tuple(range(3)), seed=7),
)


class Remembered(Drafter):
    """Guesses what came in an earlier run, with some mistakes."""

    def __init__(self, known: dict[str, list[int]]) -> None:
        self.known = known
        self.rng = Random(0)

    def draft(self, seq: Sequence) -> list[int]:
        tokens = self.known[seq.request_id][seq.num_computed_tokens :][: self.rng.randint(0, 3)]
        return [token if self.rng.random() < 0.8 else self.rng.randrange(60) for token in tokens]


def check(folder: Path, sampling: tuple[SamplingParams, ...], **options: Any) -> list[StepPlan]:
    """Run the prompts without and with drafts: the outputs are equal. Returns the plans with drafts."""
    expected = Engine(folder, **options).run(PROMPTS, sampling)
    engine = Engine(folder, **options)
    plans: list[StepPlan] = []
    launch = engine.runner.launch

    def note(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    engine.runner.launch = note  # type: ignore[method-assign]
    ids = [engine.add(prompt, params) for prompt, params in zip(PROMPTS, sampling, strict=True)]
    known = {name: prompt + each[0] for name, prompt, each in zip(ids, PROMPTS, expected, strict=True)}
    engine.scheduler.drafter = Remembered(known)
    engine.drain()
    assert [[engine.outputs[name, 0]] for name in ids] == expected
    assert any(plan.num_drafts for plan in plans)
    return plans


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_are_those_of_the_plain_run(checkpoint: Make, depth: int, kernels: str) -> None:
    folder, _ = checkpoint("llama")
    options = schedule(4096, 16, depth, num_tokens=3200) | {"cpu_kernels": kernels}
    plans = check(folder, SAMPLING, **options)
    assert any(any(plan.start_bounds) for plan in plans) == (depth > 0)
    if depth == 0:
        assert len(plans) < NUM_NEW, "some drafts are right"
    check(folder, tuple(replace(params, num_logprobs=2) for params in SAMPLING), **options)


class Drawn:
    """A download of tokens that are there."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = pack_int32(tokens)

    def is_ready(self) -> bool:
        return True

    def wait(self) -> bytes:
        return self.tokens


def drafts_for(*, grammar_rows: tuple[int, ...] = ()) -> Drafts:
    state = RowState(8, 64, 16, CpuDevice(1))
    return Drafts(state, 8, lambda row: row in grammar_rows)


def plan_of(
    rows: list[int], start: list[int], num_drafts: list[int], draft_ids: list[int], start_bounds: bytes = b""
) -> StepPlan:
    return StepPlan(
        0,
        pack_int32(rows),
        pack_int32(start),
        pack_int32(1 + count for count in num_drafts),
        b"\1" * len(rows),
        num_drafts=pack_int32(num_drafts),
        draft_token_ids=pack_int32(draft_ids),
        start_bounds=start_bounds,
    )


def test_a_row_ends_at_the_first_wrong_guess_or_failed_draw() -> None:
    plan = plan_of([4, 1, 6, 2, 5], [10, 20, 30, 40, 50], [2, 0, 1, 2, 1], [7, 8, 9, 3, 4, 5])
    drafts = drafts_for()
    batch, step = drafts.expand(plan, host_batch(plan))
    assert step is not None
    assert batch.rows.tolist() == [4, 4, 4, 1, 6, 6, 2, 2, 2, 5, 5]
    assert batch.start.tolist() == [10, 11, 12, 20, 30, 31, 40, 41, 42, 50, 51]
    # All right; none guessed; wrong; right, then no token; no token at once.
    tokens = [7, 8, 11, 12, 13, 14, 3, 4, -1, -1, 15]
    step.download = Drawn(tokens)
    result = drafts.finish(step, StepResult(0, pack_int32(tokens)), (RowError(4, "no word"),))
    assert list(unpack_int32(result.num_tokens)) == [3, 1, 1, 2, 1]
    assert list(unpack_int32(result.token_ids)) == [7, 8, 11, 12, 13, 3, 4, 0]
    assert [(error.sample_idx, error.code) for error in result.row_errors] == [(2, "grammar"), (4, "invalid_logits")]
    later = plan_of([4, 6, 2], [13, 32, 43], [0, 0, 0], [], start_bounds=b"\1\1\1")
    assert drafts.expand(later, host_batch(later))[0].start.tolist() == [13, 31, 42]


def test_the_guesses_for_a_row_with_a_grammar_are_left_alone() -> None:
    plan = plan_of([1, 2], [5, 5], [2, 1], [7, 8, 9])
    batch, step = drafts_for(grammar_rows=(1,)).expand(plan, host_batch(plan))
    assert step is not None
    assert (batch.rows.tolist(), batch.start.tolist(), batch.num_new.tolist()) == ([1, 2, 2], [5, 5, 6], [1, 1, 1])
    step.download = Drawn([7, 9, 10])
    result = step.trimmed(StepResult(0, pack_int32([7, 9, 10])), ())
    assert list(unpack_int32(result.num_tokens)) == [1, 2]
