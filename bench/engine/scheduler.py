"""CPU time that the scheduler itself costs per step: `schedule()` + `process()` of one decode step, fed by nobody.

    python -m bench.engine.scheduler
    python -m bench.engine.scheduler --policy sjf,hrrn,cache-aware,fair

Three columns: the median step (rows cross into a new page all at different steps, as in life), with the
messages encoded and decoded as on the wire, and the first again after many requests have come and gone.

With --policy, each policy is measured beside fcfs: their steps alternate in blocks, while requests of several tenants
wait behind full rows. `steady`: all rows decode. `turnover`: rows end, waiting requests enter them and others come, as
many in each step; there the mean counts, because work is not in every step.
"""

import argparse
import gc
import statistics
import time
from array import array
from collections.abc import Callable
from random import Random

import msgspec

from penstock.config import Config
from penstock.config.options import SchedulerOptions
from penstock.core.scheduling.scheduler import Scheduler
from penstock.core.sequences.limits import WorkerLimits
from penstock.ipc.messages import AddRequest, SamplingParams, StepPlan, StepResult
from penstock.parts.policies.options import PolicyOptions

PAGE_SIZE = 16
PIPELINE_DEPTH = 1
SECONDS_PER_STEP = 0.02
BLOCK = 20
NEVER = 1 << 12
"""Outputs that are longer than the measurement."""


def make_scheduler(num_rows: int) -> Scheduler:
    options = SchedulerOptions(max_num_seqs=num_rows, pipeline_depth=PIPELINE_DEPTH, max_num_queued_seqs=1 << 20)
    return Scheduler(
        Config(scheduler=options), WorkerLimits(num_rows * 512 + 1024, PAGE_SIZE, num_rows, 1 << 16, 8192, 1 << 17)
    )


def add_requests(scheduler: Scheduler, count: int, prompt_len: int, max_tokens: int, name: str) -> None:
    for i in range(count):
        length = prompt_len + i % PAGE_SIZE  # so that not all rows need a page in the same step
        prompt = array("i", range(i, i + length)).tobytes()
        request = AddRequest(f"{name}-{i:06d}", prompt, SamplingParams(max_tokens=max_tokens, stop_token_ids=(2, 3)))
        refusal = scheduler.add_request(request, b"frontend-0")
        assert refusal is None, refusal


def answer(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, array("i", [1000] * sum(plan.samples)).tobytes())


def finish_all(scheduler: Scheduler) -> None:
    plans: list[StepPlan] = []
    while scheduler.has_work:
        while (step := scheduler.schedule()) is not None:
            plans.append(step.plan)
        scheduler.process(answer(plans.pop(0)))


def time_steps(scheduler: Scheduler, num_steps: int, *, with_codec: bool) -> list[float]:
    """Return microseconds of each decode step in a running pipeline."""
    encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
    decode_result = msgspec.msgpack.Decoder(StepResult).decode
    plans: list[StepPlan] = []
    times = []
    for _ in range(num_steps + 32):
        while scheduler.can_schedule and (step := scheduler.schedule()) is not None:
            plans.append(step.plan)
        result = answer(plans.pop(0))
        raw = encode(result)
        started = time.perf_counter()
        if with_codec:
            result = decode_result(raw)
        told = scheduler.process(result)
        planned = scheduler.schedule()
        if with_codec:
            encode(planned.plan if planned else None)
            for batch in told.values():
                encode(batch)
        times.append((time.perf_counter() - started) * 1e6)
        if planned is not None:
            plans.append(planned.plan)
    for plan in plans:  # leave nothing in flight
        scheduler.process(answer(plan))
    return times[32:]


def measure(num_rows: int, num_steps: int, num_finished: int, *, with_codec: bool) -> float:
    """Return the median microseconds per step with `num_rows` decodes, after `num_finished` other requests."""
    scheduler = make_scheduler(num_rows)
    if num_finished:
        add_requests(scheduler, num_finished, 24, 4, "old")
        finish_all(scheduler)
    add_requests(scheduler, num_rows, 32, 7000, "new")
    gc.collect()
    return statistics.median(time_steps(scheduler, num_steps, with_codec=with_codec))


class Load:
    """A scheduler with full rows and a queue, in virtual time."""

    def __init__(self, policy: str, num_rows: int, num_waiting: int, num_outputs: int) -> None:
        options = SchedulerOptions(max_num_seqs=num_rows, pipeline_depth=PIPELINE_DEPTH, max_num_queued_seqs=1 << 20)
        config = Config(scheduler=options).with_options(PolicyOptions(scheduling_policy=policy))
        self._scheduler = Scheduler(
            config, WorkerLimits(num_rows * 512 + 4096, PAGE_SIZE, num_rows, 1 << 16, 8192, 1 << 17)
        )
        self._random = Random(0)
        self._now = 0.0
        self._num_live = num_rows + num_waiting
        self._num_outputs = num_outputs
        self._num_added = 0
        self._plans: list[StepPlan] = []

    def step(self) -> float:
        """Return the microseconds that one step costs, with the requests that come."""
        scheduler, random = self._scheduler, self._random
        requests = []
        for _ in range(self._num_live - len(scheduler.requests)):
            self._num_added += 1
            family, own = random.randrange(8), self._num_added % 1000
            prompt = array("i", [family] * 64 + [own] * random.randint(1, 192)).tobytes()
            most = random.randint(1, 2 * self._num_outputs)
            requests.append(
                AddRequest(
                    f"{self._num_added}", prompt, SamplingParams(max_tokens=most, stop_token_ids=(2, 3)),
                    tenant=f"tenant-{random.randrange(8)}", priority=random.randrange(4), ttft_left=60.0, tpot=1.0,
                )
            )  # fmt: skip
        self._now += SECONDS_PER_STEP
        result = answer(self._plans.pop(0)) if self._plans else None
        started = time.thread_time()
        if result is not None:
            scheduler.process(result)
        for request in requests:
            scheduler.add_request(request, b"frontend-0", self._now)
        while (planned := scheduler.schedule(self._now)) is not None:
            self._plans.append(planned.plan)
        return (time.thread_time() - started) * 1e6


def compare(policy: str, num_rows: int, num_waiting: int, num_steps: int, num_outputs: int) -> tuple[float, float]:
    """Return the microseconds per step under fcfs and under the policy: the median, and with a turnover the mean."""
    loads = [Load(name, num_rows, num_waiting, num_outputs) for name in ("fcfs", policy)]
    times: list[list[float]] = [[], []]
    for load in loads:
        for _ in range(64):
            load.step()
    gc.collect()
    for i in range(2 * num_steps // BLOCK):
        times[i % 2] += [loads[i % 2].step() for _ in range(BLOCK)]
    middle = statistics.median if num_outputs >= NEVER else _trimmed_mean
    return middle(times[0]), middle(times[1])


def _trimmed_mean(times: list[float]) -> float:
    """Without the longest steps, in which another process had the core."""
    return statistics.fmean(sorted(times)[: len(times) * 99 // 100])


def compare_policies(policies: list[str], num_waiting: int, num_steps: int) -> None:
    columns = (("steady", NEVER), ("turnover", 64))
    print(f"{'policy':>12}" + "".join(f"{name:>16}{'fcfs':>8}{'ratio':>7}" for name, _ in columns))
    for policy in policies:
        line = f"{policy:>12}"
        for _, num_outputs in columns:
            base, own = compare(policy, 256, num_waiting, num_steps, num_outputs)
            line += f"{own:>16.1f}{base:>8.1f}{own / base:>7.2f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="timed steps per figure")
    parser.add_argument(
        "--finished", type=int, default=10_000, help="requests that have come and gone in the last column"
    )
    parser.add_argument("--policy", default="", help="compare these policies with fcfs, separated by commas")
    parser.add_argument("--waiting", type=int, default=1000, help="requests that wait meanwhile")
    arguments = parser.parse_args()
    if arguments.policy:
        compare_policies(arguments.policy.split(","), arguments.waiting, arguments.steps)
        return
    print(f"{'decode rows':>12} {'us/step':>10} {'+ codec':>10} {f'after {arguments.finished}':>14}")
    for num_rows in (1, 64, 256):
        plain = measure(num_rows, arguments.steps, 0, with_codec=False)
        codec = measure(num_rows, arguments.steps, 0, with_codec=True)
        after = measure(num_rows, arguments.steps, arguments.finished, with_codec=False)
        print(f"{num_rows:>12} {plain:>10.1f} {codec:>10.1f} {after:>14.1f}")


if __name__ == "__main__":
    main()
