"""CPU time that drafts cost the scheduler per step, beside a scheduler without a drafter.

    python -m bench.speculation.scheduler

Three schedulers take turns, some steps each: `plain` has no drafter; what `wrong`'s drafter guesses is never right, so
it is rarely asked; `right`'s guesses are right four times out of five, and pay. A worker made of nothing answers; a
step takes 20 ms, and 100 us for each guess.
"""

import argparse
import gc
import statistics
import time
from array import array
from dataclasses import replace
from random import Random

from bench.scheduling.scheduler import add_requests, make_scheduler
from penstock.core.scheduling.scheduler import Scheduler
from penstock.core.steps.draft_lengths import draft_lengths
from penstock.ipc.messages import StepPlan, StepResult

_MOST = 4
_BLOCK = 50
_CHANCES = {"plain": None, "wrong": 0.0, "right": 0.8}


class Running:
    """A scheduler whose rows all decode, and its worker."""

    def __init__(self, num_rows: int, chance: float | None) -> None:
        """`chance`: that a guess is right; None: there is no drafter."""
        self.scheduler = _with_drafter(num_rows) if chance is not None else make_scheduler(num_rows)
        self._chance = chance or 0.0
        self._random = Random(0)
        self._plans: list[StepPlan] = []
        self.times: list[float] = []
        self.num_tokens = 0
        add_requests(self.scheduler, num_rows, 32, 7500, "new")
        self._fill()

    def step(self) -> None:
        """Apply one result, and plan another step."""
        result = self._answer(self._plans.pop(0))
        began = time.thread_time()
        self.scheduler.process(result)
        step = self.scheduler.schedule()
        self.times.append((time.thread_time() - began) * 1e6)
        if step is not None:
            self._plans.append(step.plan)
        self._fill()

    def _fill(self) -> None:
        while (step := self.scheduler.schedule()) is not None:
            self._plans.append(step.plan)

    def _answer(self, plan: StepPlan) -> StepResult:
        num_samples = plan.samples.count(1)
        if not plan.num_drafts:
            self.num_tokens += num_samples
            return StepResult(plan.step_id, array("i", [1000] * num_samples).tobytes(), 20_000)
        allowed = memoryview(plan.num_drafts).cast("i").tolist()
        counts = [1 + self._num_right(most) for most in allowed]
        self.num_tokens += sum(counts)
        return StepResult(
            plan.step_id,
            array("i", [1000] * sum(counts)).tobytes(),
            20_000 + 100 * sum(allowed),
            num_tokens=array("i", counts).tobytes(),
            num_drafted=plan.num_drafts,
        )

    def _num_right(self, most: int) -> int:
        return next((i for i in range(most) if self._random.random() >= self._chance), most)


def _with_drafter(num_rows: int) -> Scheduler:
    scheduler = make_scheduler(num_rows)
    limits = replace(scheduler.limits, max_drafts=_MOST, drafter="nobody")
    scheduler._set_limits(limits)
    scheduler.drafting.lengths = draft_lengths(_MOST, None)
    return scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="timed steps of each")
    parser.add_argument("--rows", default="1,4,16,64,256")
    arguments = parser.parse_args()
    print(f"{'rows':>6}{'plain us':>10}{'wrong us':>10}{'right us':>10}{'us a token, plain':>20}{'right':>8}")
    for num_rows in map(int, arguments.rows.split(",")):
        running = {name: Running(num_rows, chance) for name, chance in _CHANCES.items()}
        for each in running.values():
            for _ in range(200):
                each.step()
            each.times.clear()
            each.num_tokens = 0
        gc.collect()
        gc.freeze()
        for i in range(len(running) * arguments.steps // _BLOCK):
            each = list(running.values())[i % len(running)]
            for _ in range(_BLOCK):
                each.step()
        # Means without the longest steps, in which another process had the core: work is not in every step.
        mean = {
            name: statistics.fmean(sorted(each.times)[: len(each.times) * 98 // 100]) for name, each in running.items()
        }
        a_token = {name: mean[name] * len(each.times) / each.num_tokens for name, each in running.items()}
        print(
            f"{num_rows:>6}{mean['plain']:>10.1f}{mean['wrong']:>10.1f}{mean['right']:>10.1f}"
            f"{a_token['plain']:>20.2f}{a_token['right']:>8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
