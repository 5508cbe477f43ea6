"""Extracts from a recording (`--record`) what a simulation needs: steps, requests and delays."""

from pathlib import Path
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from penstock.lab.simulation.arrivals import Arrival, ShownImage
from penstock.lab.simulation.fit import MeasuredStep
from penstock.lab.simulation.worker import shape_of
from penstock.parts.recording import lines
from penstock.parts.recording.reader import Recorded, Recording, Run


class Delays(NamedTuple):
    """Seconds from a request to its first token and to its last."""

    first: float
    last: float


def read_run(path: Path) -> Run:
    """Read the longest run of a recording.

    Raises:
        ConfigError: it cannot be read.
    """
    return max(Recording.read(path).runs, key=lambda run: len(run.events))


def arrivals_of(run: Run) -> tuple[list[Arrival], list[Delays]]:
    """Return the completed sequences of a run as separate requests, and the delays of each.

    The first request comes at 0. Delays count from a request's arrival at the scheduler to the sending of tokens.
    """
    found = []
    for recorded in run.requests.values():
        for idx, end in recorded.ends.items():
            if end.num_tokens and not end.error:
                came = recorded.arrival.at
                found.append((_arrival(recorded, idx), Delays(end.first_token_at - came, end.at - came)))
    found.sort(key=lambda each: each[0].time)
    began = found[0][0].time if found else 0.0
    return [replace(each, time=each.time - began) for each, _ in found], [delays for _, delays in found]


def steps_of(run: Run) -> list[MeasuredStep]:
    """Return the run's steps that have results and no guesses. The scheduler's own time is not recorded."""
    results = {event.step: event for event in run.events if isinstance(event, lines.Result)}
    # Beside steps, a tower gets a third of the time.
    encoding = [(each.at - 3 * each.us / 1e6, each.at) for each in run.events if isinstance(each, lines.Encoded)]
    steps = []
    for planned, plan in run.plans():
        result = results.get(planned.step)
        if result is not None and result.forward_us and not plan.num_drafts:
            forward, idle = result.forward_us / 1e6, result.idle_us / 1e6
            if any(begin <= planned.at <= end for begin, end in encoding):
                idle = -1.0
            steps.append(MeasuredStep(shape_of(plan), forward, idle, planned.at, result.at))
    return steps


def admission_of(run: Run) -> float:
    """Return the seconds from a request's arrival at an idle scheduler until its plan was sent; 0: never seen."""
    found, arrived, num_begun = list[float](), 0.0, 0
    for event in run.events:
        match event:
            case lines.Worker():  # it does not know the steps that the previous worker had begun
                arrived, num_begun = 0.0, 0
            case lines.Arrival() if not num_begun and not event.refused:
                arrived = arrived or event.at
            case lines.Plan():
                if arrived:
                    found.append(event.at - arrived)
                arrived, num_begun = 0.0, num_begun + 1
            case lines.Result():
                num_begun = max(0, num_begun - 1)
    return median(found) if found else 0.0


def encoded_of(run: Run) -> list[tuple[int, float]]:
    """Return (number of embeddings, seconds) of each image that was encoded."""
    found = [each for each in run.events if isinstance(each, lines.Encoded) and not each.failed]
    return [(each.num_embeddings, each.us / 1e6) for each in found if each.num_embeddings]


def _arrival(recorded: Recorded, idx: int) -> Arrival:
    request, end = recorded.arrival, recorded.ends[idx]
    asked = int(request.sampling.get("max_tokens", 0))
    return Arrival(
        time=max(0.0, request.at),
        input_len=request.num_tokens,
        output_len=end.num_tokens,
        pages=request.pages,
        key=request.tenant,
        weight=float(request.more.get("weight", 1.0)),
        priority=request.priority,
        ttft_ms=1e3 * float(request.more.get("ttft_left", 0.0)),
        tpot_ms=1e3 * float(request.more.get("tpot", 0.0)),
        images=tuple(ShownImage(each.key, each.start, each.length, each.num_embeddings) for each in request.images),
        max_tokens=asked if end.reason == "stop" and asked > end.num_tokens else 0,
    )
