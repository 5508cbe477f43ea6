"""The batching kinds beside each other: the real scheduler in virtual time, one load at several rates.

    python -m bench.scheduling.batching [--plot docs/_static/batching.svg]

Requests come at random (a Poisson process). Half of them are short questions of one key, half are long ones of another
key; lengths vary within both. All outputs stop before their `max_tokens`, as a model's do. Steps take as long as on the
made-up device `Linear`, which is like a GPU with a model of 8 billion parameters.

    used       part of the rows x seconds of steps in which a row computed something
    latency    from a request's arrival to its last token, mean and 99th percentile
    padded     part that padding would have been of prompts and outputs, if every batch were padded to its longest
               prompt and ran to its longest output as a rectangle, as with padded tensors; none without batches
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

from penstock.config.options import BatchingName, SchedulerOptions
from penstock.core.sequences.sequence import Request
from penstock.ipc.messages import PROTOCOL_VERSION, AddRequest, WorkerHello
from penstock.lab.simulation.arrivals import Arrival, Bursts
from penstock.lab.simulation.device import StepShape, Timing
from penstock.lab.simulation.figures import percentile
from penstock.lab.simulation.plot import check_plot
from penstock.lab.simulation.prompts import Prompts
from penstock.lab.simulation.simulator import Simulator, messages
from penstock.parts.batching.scheduler.batches import Batches

KINDS: tuple[BatchingName, ...] = get_args(BatchingName)
NUM_ROWS = 32
MAX_TOKENS = 1024
RATES = (1.0, 2.0, 4.0, 6.0, 8.0)
HELLO = WorkerHello(
    PROTOCOL_VERSION, "w", 0, "bench", "virtual", "", 32000, 4096, 16, NUM_ROWS * 256, NUM_ROWS, 2048
)  # fmt: skip

TIMING = Timing(scheduler=1e-4, transport=2e-4)


class Linear:
    """10 ms for reading the weights; more for each token of a prompt, each row, and each token of its context."""

    overlaps_copies = True
    stages = (1.0,)

    def __init__(self) -> None:
        self.row_seconds = 0.0
        self.busy = 0.0

    def walk(self, seed: int) -> Self:
        """All steps of a shape are alike."""
        return self

    def seconds(self, shape: StepShape) -> float:
        """Of a step."""
        num_rows, num_prompt_tokens = len(shape.decodes) + len(shape.chunks), sum(count for _, count in shape.chunks)
        seconds = 10e-3 + 40e-6 * num_prompt_tokens + 20e-6 * num_rows + 20e-9 * sum(shape.decodes)
        self.row_seconds += num_rows * seconds
        self.busy += seconds
        return seconds

    def gap(self, shape: StepShape) -> float:
        """Between two steps."""
        return 0.0


class Figures(NamedTuple):
    """Of one kind at one rate."""

    kind: str
    rate: float  # requests a second
    used: float
    mean: float  # seconds
    p99: float
    padded: float
    per_second: float  # tokens of output


def arrivals(count: int, rate: float) -> list[Arrival]:
    """Short questions and long ones; the same seed and so the same lengths at every rate."""
    rng = random.Random(1)
    found = []
    for at in Bursts(rate=rate).times(count, random.Random(2)):
        key, prompt, output = rng.choice([("chat", 60, 60), ("report", 600, 400)])
        prompt, output = (max(1, min(1000, round(rng.lognormvariate(0.0, 0.4) * each))) for each in (prompt, output))
        found.append(Arrival(time=at, input_len=prompt, output_len=output, key=key, max_tokens=MAX_TOKENS))
    return found


def measure(kind: BatchingName, load: Sequence[Arrival], requests: Sequence[AddRequest], rate: float) -> Figures:
    """Run the load under a kind."""
    options = SchedulerOptions(
        batching=kind, max_num_seqs=NUM_ROWS, batch_wait_ms=1000, queue_patience=0.0, enable_prefix_caching=False
    )
    device = Linear()
    simulator = Simulator(options, HELLO, device, TIMING, load, requests)
    lengths = {str(i): (each.input_len, each.output_len) for i, each in enumerate(load)}
    batches = note_batches(simulator)
    run = simulator.run()
    latencies = sorted(each.e2e for each in run.outcomes)
    useful = padded = 0
    for batch in batches:
        prompts, outputs = zip(*(lengths[name] for name in batch), strict=True)
        useful += sum(prompts) + sum(outputs)
        padded += len(batch) * (max(prompts) + max(outputs))
    return Figures(
        kind,
        rate,
        device.row_seconds / (NUM_ROWS * device.busy),
        sum(latencies) / len(latencies),
        percentile(latencies, 0.99),
        1 - useful / padded if padded else 0.0,
        sum(each.output_len for each in load) / max(each.ended for each in run.outcomes),
    )


def note_batches(simulator: Simulator) -> list[list[str]]:
    """Return a list that grows by the ids of each batch that begins."""
    batches: list[list[str]] = []
    if (part := simulator.scheduler.parts.get(Batches)) is not None:
        kind = part.kind
        choose = kind.choose

        def noted(waiting: Iterable[Request], size: int) -> list[Request]:
            chosen = choose(waiting, size)
            batches.append([request.request_id for request in chosen])
            return chosen

        kind.choose = noted  # type: ignore[method-assign]
    return batches


def plot(found: Sequence[Figures], path: Path) -> None:
    """Write the picture."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        figure = Figure(figsize=(11, 6.5), layout="constrained")
        panels: list[list[Any]] = figure.subplots(2, 2).tolist()
        shown = (
            ("mean", "mean latency, s"), ("p99", "99th percentile of the latency, s"),
            ("used", "part of rows x time in use"), ("padded", "part that padding would have been"),
        )  # fmt: skip
        for (field, label), axes in zip(shown, [axes for row in panels for axes in row], strict=True):
            for number, kind in enumerate(KINDS):
                points = [each for each in found if each.kind == kind]
                style = {"marker": "o", "color": ("#0b6e99", "#d9822b", "#7b4fa3", "#4d8c3a")[number], "label": kind}
                axes.plot([each.rate for each in points], [getattr(each, field) for each in points], **style)
            axes.set(xlabel="requests a second", ylabel=label)
            axes.set(**{"yscale": "log"} if field in ("mean", "p99") else {"ylim": (0, 1)})
            axes.grid(alpha=0.3)
        panels[0][0].legend(fontsize="small")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600, help="at each rate")
    parser.add_argument("--plot", type=Path, help="write a picture to this file (.svg or .png)")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        check_plot(arguments.plot)
    found = []
    print(f"{'kind':>14} {'requests/s':>10} {'used':>6} {'mean s':>8} {'p99 s':>8} {'padded':>7} {'tokens/s':>9}")
    for rate in RATES:
        load = arrivals(arguments.requests, rate)
        prompts = Prompts(HELLO.vocab_size, 16, 1000, 0)
        requests = messages(load, map(prompts.make, load), TIMING)
        for kind in KINDS:
            each = measure(kind, load, requests, rate)
            found.append(each)
            print(
                f"{kind:>14} {rate:>10.1f} {each.used:>6.2f} {each.mean:>8.2f} {each.p99:>8.2f} {each.padded:>7.2f} "
                f"{each.per_second:>9.0f}"
            )
    if arguments.plot is not None:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
