"""Lengths that adapt: what is guessed follows what is right and what it costs, in simulated time."""

from collections.abc import Callable
from random import Random

import pytest

from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.steps.drafts import DraftOutcome, DraftRoom
from penstock.parts.drafts.scheduler.adaptive import AdaptiveLengths, draft_lengths
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from tests.core.driver import make_request

Cost = Callable[[int, int, int, int], float]
"""Microseconds of a step: rows, tokens in their contexts, guesses, most guesses of a row."""


def memory_bound(rows: int, context: int, guesses: int, longest: int) -> float:
    """Reads weights once; a position costs little. A guess costs nothing."""
    return 20_000 + 300 * (rows + guesses) + 0.5 * context


def compute_bound(rows: int, context: int, guesses: int, longest: int) -> float:
    """Each position costs the same."""
    return 500 + 5_000 * (rows + guesses)


def with_draft_model(rows: int, context: int, guesses: int, longest: int) -> float:
    """Each further guess is a step of a smaller model."""
    return memory_bound(rows, context, guesses, longest) + 4_000 * longest


def make_rows(num: int, max_drafts: int = -1) -> list[Sequence]:
    requests = [make_request(f"r{i}", [1, 2, 3], 1000, max_drafts=max_drafts) for i in range(num)]
    return [Request(request, b"", 4096).waiting[0] for request in requests]


class Simulation:
    """Steps of rows that decode, without overlap."""

    def __init__(self, num_rows: int, most: int, cost: Cost, chances: list[float], *, noise: float = 0.05) -> None:
        """`chances`: of each row, that a guess is right if those before it are."""
        self.lengths = AdaptiveLengths(most)
        self.rows = make_rows(num_rows)
        self.cost, self.chances = cost, chances
        self.rng, self.noise = Random(3), noise
        self.guess_rates = [1.0] * num_rows
        self.context = 100 * num_rows
        self.us = self.plain_us = 0.0
        self.num_tokens = self.num_plain_tokens = self.num_with = self.num_guessed = 0
        self.allowed = [0] * num_rows

    def step(self, most: int = 1000, *, has_prompts: bool = False) -> list[int]:
        num = len(self.rows)
        allowed = list(self.lengths.lengths(self.rows, DraftRoom(most, self.context, has_prompts)))
        assert sum(allowed) <= most
        assert all(0 <= each <= self.lengths.most for each in allowed)
        guessed = [
            each if self.rng.random() < rate else 0 for each, rate in zip(allowed, self.guess_rates, strict=False)
        ]
        returned = [1] * num
        for i, count in enumerate(guessed):
            while returned[i] <= count and self.rng.random() < self.chances[i]:
                returned[i] += 1
        us = self.cost(num, self.context, sum(guessed), max(guessed, default=0)) * (1 + self.rng.uniform(0, self.noise))
        if allowed:
            self.num_with += 1
            self.lengths.note(
                DraftOutcome(self.rows, allowed, guessed, returned, self.context, has_prompts, int(us), 0)
            )
            self.allowed = [before + each for before, each in zip(self.allowed, allowed, strict=True)]
        else:
            self.lengths.note_plain(num, self.context, int(us))
        self.num_guessed += sum(guessed)
        self.us += us
        self.num_tokens += sum(returned)
        self.plain_us += self.cost(num, self.context, 0, 0) * (1 + self.noise / 2)
        self.num_plain_tokens += num
        self.context += num
        return allowed

    def run(self, num_steps: int) -> float:
        """Return the speed relative to that without guesses."""
        for _ in range(num_steps):
            self.step()
        return (self.num_tokens / self.us) / (self.num_plain_tokens / self.plain_us)

    def forget_figures(self) -> None:
        self.us = self.plain_us = 0.0
        self.num_tokens = self.num_plain_tokens = self.num_with = self.num_guessed = 0


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound, with_draft_model])
def test_wrong_guesses_cost_next_to_nothing(num_rows: int, cost: Cost) -> None:
    simulation = Simulation(num_rows, 4, cost, [0.0] * num_rows)
    assert simulation.run(400) > 0.97
    simulation.forget_figures()
    assert simulation.run(2000) > 0.985, "afterwards it is tried rarely"
    assert simulation.num_with > 0, "but it is"


@pytest.mark.parametrize(
    ("num_rows", "most", "cost", "chance", "at_least"),
    [
        (1, 4, memory_bound, 0.95, 3.5),
        (4, 4, memory_bound, 0.95, 3.0),
        (1, 8, memory_bound, 0.98, 6.0),
        (1, 4, with_draft_model, 0.9, 2.0),
        (16, 4, memory_bound, 0.95, 2.4),
    ],
)
def test_right_guesses_bring_what_they_can(
    num_rows: int, most: int, cost: Cost, chance: float, at_least: float
) -> None:
    simulation = Simulation(num_rows, most, cost, [chance] * num_rows)
    assert simulation.run(600) > at_least


@pytest.mark.parametrize("chance", [0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_it_is_about_as_fast_as_the_best_fixed_length(num_rows: int, chance: float) -> None:
    def speed(length: int) -> float:
        tokens = sum(chance**j for j in range(length + 1))
        return tokens / with_draft_model(num_rows, 200 * num_rows, num_rows * length, length)

    simulation = Simulation(num_rows, 8, with_draft_model, [chance] * num_rows)
    simulation.run(200)
    simulation.forget_figures()
    assert simulation.run(800) > 0.92 * max(map(speed, range(9))) / speed(0)


def test_a_busy_device_does_not_guess() -> None:
    simulation = Simulation(16, 4, compute_bound, [0.8] * 16)
    simulation.run(300)
    simulation.forget_figures()
    assert simulation.run(1000) > 0.985
    assert simulation.num_guessed < 0.02 * 4 * 16 * 1000


def test_rows_have_their_own_lengths() -> None:
    """Of four rows, one copies a text."""
    simulation = Simulation(4, 4, with_draft_model, [0.0, 0.97, 0.0, 0.0])
    simulation.run(300)
    simulation.allowed = [0] * 4
    simulation.run(300)
    copying = simulation.allowed.pop(1)
    assert copying > 600
    assert sum(simulation.allowed) < 200


def test_a_row_that_begins_to_copy_is_found() -> None:
    simulation = Simulation(4, 4, memory_bound, [0.0] * 4)
    simulation.run(500)
    simulation.chances[2] = 1.0
    simulation.forget_figures()
    simulation.run(300)
    assert simulation.num_tokens > 1.5 * simulation.num_plain_tokens


def test_a_drafter_that_guesses_nothing_has_not_failed() -> None:
    """It has no row to pay for, and once it guesses it is right."""
    simulation = Simulation(1, 4, memory_bound, [1.0])
    simulation.guess_rates = [0.0]
    assert simulation.run(500) > 0.97
    simulation.guess_rates = [1.0]
    simulation.forget_figures()
    assert simulation.run(100) > 2.5


def test_guesses_that_come_now_and_then_are_not_missed() -> None:
    """As with the keys of a form, which are forced, between values, which nobody guesses."""
    simulation = Simulation(1, 8, memory_bound, [1.0])
    for _ in range(40):
        value_ends, form_ends = simulation.num_tokens + 40, simulation.num_tokens + 60
        simulation.guess_rates = [0.0]
        while simulation.num_tokens < value_ends:
            simulation.step()
        simulation.guess_rates = [1.0]
        while simulation.num_tokens < form_ends:
            simulation.step()
    assert simulation.num_tokens / simulation.us > 1.25 * simulation.num_plain_tokens / simulation.plain_us


def test_what_pays_no_more_is_left() -> None:
    simulation = Simulation(1, 4, with_draft_model, [0.95])
    simulation.run(300)
    simulation.chances = [0.0]
    simulation.forget_figures()
    simulation.run(2000)
    assert simulation.num_with < 120


def test_requests_say_how_many_at_most() -> None:
    for most in (0, 1):
        simulation = Simulation(2, 4, memory_bound, [1.0, 1.0])
        simulation.rows = make_rows(1, most) + make_rows(1)
        simulation.run(200)
        first = simulation.allowed[0]
        assert first == 0 if most == 0 else 0 < first <= simulation.num_with
        assert simulation.allowed[1] > 400


def test_prompts_are_not_beside_tries() -> None:
    simulation = Simulation(2, 4, memory_bound, [0.0, 0.0])
    simulation.run(400)
    assert not any(any(simulation.step(has_prompts=True)) for _ in range(300))
    simulation.chances = [1.0, 1.0]
    simulation.run(300)
    given = [sum(simulation.step(5, has_prompts=True)) for _ in range(50)]
    assert max(given) == 5


def test_where_no_time_is_known_it_goes_by_what_was_right() -> None:
    simulation = Simulation(2, 4, lambda *_: 0.0, [0.0, 1.0])
    for _ in range(200):
        simulation.step()
    assert simulation.allowed[1] > 150


def test_a_new_worker_is_guessed_for_as_before() -> None:
    nothing = draft_lengths(0, FixedLengths(4))
    assert list(nothing.lengths(make_rows(2), DraftRoom(8, 0))) == []
    first = draft_lengths(4, nothing)
    assert isinstance(first, AdaptiveLengths)
    assert draft_lengths(4, first) is first
    assert draft_lengths(2, first) is not first
    assert isinstance(draft_lengths(4, FixedLengths(4)), AdaptiveLengths)
