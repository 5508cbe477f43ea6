"""The real worker verifies drafts: whatever is guessed, the tokens are those of the plain run."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.host_step import host_batch
from penstock.gpu_worker.steps.row_part import RowPart
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import NewRow, RowError, SamplingParams, StepPlan, StepResult
from penstock.parts.drafts.worker.drafter import Drafter, Guesses, Int32Array, Traits
from penstock.parts.drafts.worker.drafts import Drafts
from penstock.parts.drafts.worker.guarded import Guarded, guarded
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.parts.drafts.drafters import draft_with
from tests.parts.drafts.lengths import draft_always
from tests.parts.drafts.worker.remembered import Remembered

Make = Callable[..., Checkpoint]
NUM_NEW = 24
PROMPTS = prompts((1, 45, 17, 64), seed=1)
SAMPLING = (
    SamplingParams(max_tokens=NUM_NEW, temperature=0.0),
    SamplingParams(max_tokens=NUM_NEW, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11),
    SamplingParams(max_tokens=NUM_NEW, repetition_penalty=1.2, frequency_penalty=0.3, seed=2**62 + 1),
    SamplingParams(max_tokens=NUM_NEW, temperature=1.3, min_tokens=9, stop_token_ids=tuple(range(3)), seed=7),
)


def check(folder: Path, sampling: tuple[SamplingParams, ...], **options: Any) -> list[StepPlan]:
    """Run the prompts without and with drafts: the outputs are equal. Returns the plans with drafts."""
    expected = Engine(folder, **options).run(PROMPTS, sampling)
    engine = Engine(folder, **options)
    plans: list[StepPlan] = []
    launch = engine.runner.launch

    def note(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    engine.runner.launch = note  # type: ignore[method-assign, assignment]
    ids = [engine.add(prompt, params) for prompt, params in zip(PROMPTS, sampling, strict=True)]
    known = [prompt + each[0] for prompt, each in zip(PROMPTS, expected, strict=True)]
    draft_with(engine.runner, partial(Remembered, known))
    draft_always(engine.scheduler, 3)
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


class Failing(Remembered):
    """Fails when it is asked for the fourth time."""

    num_asked = 0

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        self.num_asked += 1
        if self.num_asked == 4:
            raise RuntimeError("no more guesses")
        return super().guess(rows, positions, most)


def test_a_drafter_that_fails_is_switched_off_and_the_scheduler_told(checkpoint: Make) -> None:
    folder, _ = checkpoint("llama")
    options = schedule(4096, 16, 1, num_tokens=3200)
    expected = Engine(folder, **options).run(PROMPTS, SAMPLING)
    engine = Engine(folder, **options)
    known = [prompt + each[0] for prompt, each in zip(PROMPTS, expected, strict=True)]
    draft_with(engine.runner, partial(guarded, partial(Failing, known)))
    draft_always(engine.scheduler, 3)
    assert engine.run(PROMPTS, SAMPLING) == expected
    errors = [error for take in engine.scheduler.parts.take_errors for error in take()]
    assert [(event, fields["drafter"]) for event, fields in errors] == [("drafter disabled", "of a test")]
    assert "no more guesses" in errors[0][1]["reason"]
    told = engine.scheduler.stats().drafts
    assert told is not None
    assert (told.drafter, told.is_on) == ("of a test", False)
    assert told.num_steps < engine.scheduler.totals.num_steps / 2
    assert told.num_guessed >= told.num_accepted > 0


def test_a_guarded_drafter_passes_all_on() -> None:
    asked = {name for name in vars(Drafter) if not name.startswith("_")}
    assert asked - vars(Guarded).keys() == {"traits"}, "what is not passed on is what drafters without it do"


class Drawn:
    """A download of tokens that are there."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = pack_int32(tokens)

    def is_ready(self) -> bool:
        return True

    def wait(self) -> bytes:
        return self.tokens


class Given(Drafter):
    """Guesses these tokens, row by row."""

    def __init__(self, guesses: list[list[int]]) -> None:
        self.guesses = guesses

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        counts = [len(each) for each in self.guesses]
        return Guesses(np.array(counts, dtype=np.int32), np.array([*chain(*self.guesses)], dtype=np.int32))


class Forcing(RowPart):
    """The grammars of some rows: they want a 7, then any token below 50, then as many ones as there may be."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows
        self.can_extend = True

    def extend(
        self, rows: npt.NDArray[Any], guesses: Sequence[Sequence[int]], most: npt.NDArray[Any]
    ) -> list[list[int]]:
        assert set(rows.tolist()) <= set(self.rows)
        return [self._extended(list(text), count) for text, count in zip(guesses, most.tolist(), strict=True)]

    def _extended(self, text: list[int], most: int) -> list[int]:
        if text[:1] not in ([], [7]) or not text:
            return [7][:most]
        if len(text) == 1 or text[1] >= 50:
            return [7]
        return (text[:2] + [1] * most)[:most]


def drafts_for(*guesses: list[int], grammar_rows: tuple[int, ...] = ()) -> Drafts:
    """Tokens for each row that is asked for."""
    state = RowState(8, 64, 16, CpuDevice(1))
    drafts = Drafts(state, 8)
    drafts.judge_by([Forcing(grammar_rows)])
    drafts.draft_with(Given(list(guesses)))
    return drafts


def plan_of(rows: list[int], start: list[int], num_drafts: list[int], start_bounds: bytes = b"") -> StepPlan:
    return StepPlan(
        0,
        pack_int32(rows),
        pack_int32(start),
        pack_int32(1 + count for count in num_drafts),
        b"\1" * len(rows),
        num_drafts=pack_int32(num_drafts),
        start_bounds=start_bounds,
    )


def test_a_row_ends_at_the_first_wrong_guess_or_failed_draw() -> None:
    plan = plan_of([4, 1, 6, 2, 5], [10, 20, 30, 40, 50], [4, 0, 2, 2, 1])
    drafts = drafts_for([7, 8], [9], [3, 4], [5])
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
    assert list(unpack_int32(result.num_drafted)) == [2, 0, 1, 2, 1]
    later = plan_of([4, 6, 2], [15, 33, 43], [0, 0, 0], start_bounds=b"\1\1\1")
    assert drafts.expand(later, host_batch(later))[0].start.tolist() == [13, 31, 42]


def test_nothing_is_guessed_for_a_row_that_has_drawn_a_stop_token() -> None:
    """The scheduler plans ahead, and does not know yet that it has ended; what enters the row later begins anew."""
    drafts = drafts_for([7])
    for stop, sizes in ((8, [2, 1]), (9, [2, 2])):
        sampling = SamplingParams(max_tokens=9, stop_token_ids=(stop,))
        drafts.enter([NewRow(row=4, token_ids=b"", num_prompt_tokens=10, page_ids=b"", sampling=sampling)])
        for plan, size in zip((plan_of([4], [10], [1]), plan_of([4], [12], [1], b"\1")), sizes, strict=True):
            batch, step = drafts.expand(plan, host_batch(plan))
            assert batch.rows.tolist() == [4] * size
            assert step is not None
            step.download = Drawn([7, 8][:size])


@pytest.mark.parametrize(
    ("guesses_ahead", "guess", "expected"),
    [
        (True, [9, 5], [7, 9, 1, 1]),
        (True, [60, 5], [7]),
        (True, [], [7]),
        (False, None, [7]),
    ],
)
def test_a_grammar_forces_tokens_before_and_after_the_guesses_and_cuts_these(
    *, guesses_ahead: bool, guess: list[int] | None, expected: list[int]
) -> None:
    plan = plan_of([1, 2, 3], [5, 8, 4], [4, 2, 0])
    drafts = drafts_for(*([] if guess is None else [guess]), [21, 22], grammar_rows=(1, 3))
    drafter = drafts._guessing.drafter
    assert drafter is not None
    drafter.traits = Traits(guesses_ahead=guesses_ahead)
    batch, step = drafts.expand(plan, host_batch(plan))
    assert step is not None
    assert batch.rows.tolist() == [1] * (1 + len(expected)) + [2] * 3 + [3]
    assert [guess for guess in step.guesses.tolist() if guess >= 0] == [*expected, 21, 22]
    tokens = drafts._state.host_tokens(1)
    assert tokens[6 : 6 + len(expected)].tolist() == expected


def test_where_not_all_ranks_know_the_grammar_nothing_is_guessed_under_it() -> None:
    plan = plan_of([1, 2], [5, 5], [2, 1])
    drafts = drafts_for([9], grammar_rows=(1,))
    drafts._guessing.judges[0].can_extend = False
    batch, step = drafts.expand(plan, host_batch(plan))
    assert step is not None
    assert (batch.rows.tolist(), batch.start.tolist(), batch.num_new.tolist()) == ([1, 2, 2], [5, 5, 6], [1, 1, 1])
    step.download = Drawn([7, 9, 10])
    result = step.trimmed(StepResult(0, pack_int32([7, 9, 10])), ())
    assert list(unpack_int32(result.num_tokens)) == [1, 2]
