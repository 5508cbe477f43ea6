"""CPU time that the scheduler itself costs per step: `schedule()` + `process()` of one decode step, fed by nobody.

    python -m bench.scheduler

Three columns: the median step (rows cross into a new page all at different steps, as in life), with the
messages encoded and decoded as on the wire, and the first again after many requests have come and gone.
"""

import argparse
import gc
import statistics
import time
from array import array
from collections.abc import Callable

import msgspec

from penstock.core.config.options import SchedulerOptions
from penstock.core.scheduling.scheduler import Scheduler
from penstock.core.sequences.intake import WorkerLimits
from penstock.ipc.messages import AddRequest, SamplingParams, StepPlan, StepResult

PAGE_SIZE = 16
PIPELINE_DEPTH = 1


def make_scheduler(num_rows: int) -> Scheduler:
    options = SchedulerOptions(max_num_seqs=num_rows, pipeline_depth=PIPELINE_DEPTH, max_num_queued_seqs=1 << 20)
    return Scheduler(options, WorkerLimits(num_rows * 512 + 1024, PAGE_SIZE, num_rows, 1 << 16, 8192, 1 << 17))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="timed steps per figure")
    parser.add_argument(
        "--finished", type=int, default=10_000, help="requests that have come and gone in the last column"
    )
    arguments = parser.parse_args()
    print(f"{'decode rows':>12} {'us/step':>10} {'+ codec':>10} {f'after {arguments.finished}':>14}")
    for num_rows in (1, 64, 256):
        plain = measure(num_rows, arguments.steps, 0, with_codec=False)
        codec = measure(num_rows, arguments.steps, 0, with_codec=True)
        after = measure(num_rows, arguments.steps, arguments.finished, with_codec=False)
        print(f"{num_rows:>12} {plain:>10.1f} {codec:>10.1f} {after:>14.1f}")


if __name__ == "__main__":
    main()
