"""What a recording costs the scheduler's process, in CPU time: for each step, for each request, and in its thread.

    python -m bench.observing.recording

Steps are decodes with all rows busy, as in `bench.scheduling.scheduler`, of which rows cross into a new page at
different steps; beside them stands what the scheduler itself takes for such a step. One line is what one prompt costs
when it comes.
"""

import argparse
import statistics
import tempfile
import time
from array import array
from pathlib import Path

from bench.scheduling.scheduler import add_requests, answer, make_scheduler
from penstock.config import Config
from penstock.ipc.messages import AddRequest, SamplingParams, StepPlan
from penstock.parts.recording.options import RecordingOptions
from penstock.parts.recording.scheduler.recorder import Recorder


def time_steps(num_rows: int, num_steps: int, recorder: Recorder, path: Path) -> tuple[float, float, float]:
    """Median microseconds of the scheduler and of the recorder, and bytes, for each step."""
    scheduler = make_scheduler(num_rows)
    add_requests(scheduler, num_rows, 32, 7000, "new")
    plans: list[StepPlan] = []
    own, added = [], []
    size = 0
    for number in range(num_steps + 32):
        while scheduler.can_schedule and (step := scheduler.schedule()) is not None:
            plans.append(step.plan)
            recorder.on_plan(step.plan, scheduler)
        result = answer(plans.pop(0))
        started = time.thread_time()
        told = scheduler.process(result)
        planned = scheduler.schedule()
        between = time.thread_time()
        recorder.on_result(result, told.values())
        if planned is not None:
            recorder.on_plan(planned.plan, scheduler)
            plans.append(planned.plan)
        ended = time.thread_time()
        if number == 32:
            time.sleep(0.3)
            size = path.stat().st_size
        if number > 32:
            own.append((between - started) * 1e6)
            added.append((ended - between) * 1e6)
    time.sleep(0.3)
    return statistics.median(own), statistics.median(added), (path.stat().st_size - size) / len(own)


def time_request(num_tokens: int, recorder: Recorder) -> float:
    """Median microseconds for a prompt of this length."""
    scheduler = make_scheduler(64)
    times = []
    for number in range(20):
        prompt = array("i", range(number, number + num_tokens)).tobytes()
        request = AddRequest(f"{num_tokens}-{number}", prompt, SamplingParams(max_tokens=9, stop_token_ids=(2, 3)))
        refusal = scheduler.add_request(request, b"frontend-0")
        started = time.thread_time()
        recorder.on_request(request, scheduler, refusal)
        times.append((time.thread_time() - started) * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="timed steps per figure")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        recorder = Recorder(Config().with_options(RecordingOptions(record=str(path), record_mib=1 << 12)))
        before = time.process_time() - time.thread_time()
        print(f"{'rows':>8} {'scheduler us':>14} {'recorder us':>14} {'bytes':>8}")
        for num_rows in (1, 64, 256):
            own, added, size = time_steps(num_rows, steps, recorder, path)
            print(f"{num_rows:>8} {own:>14.1f} {added:>14.1f} {size:>8.0f}")
        thread = (time.process_time() - time.thread_time() - before) * 1e6 / (3 * steps)
        print(f"the writing thread: {thread:.1f} us a step")
        for num_tokens in (128, 2048, 8100):
            print(f"a prompt of {num_tokens} tokens: {time_request(num_tokens, recorder):.0f} us")
        recorder.close()


if __name__ == "__main__":
    main()
