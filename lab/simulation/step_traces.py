"""Extracts steps and requests from a recorded step trace (`--step-trace`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.config import ConfigError
from penstock.lab.simulation.arrivals import Arrival
from penstock.lab.simulation.device import StepShape
from penstock.lab.simulation.fit import MeasuredStep

Name = tuple[str, int]
"""A sequence's name: its request's id, and its index."""


class _Admission(msgspec.Struct):
    request_id: str
    sequence_idx: int
    num_tokens: int
    num_reused_tokens: int


class _Preemption(msgspec.Struct):
    request_id: str
    sequence_idx: int


class _Line(msgspec.Struct):
    """The fields of a line that are used here."""

    t_schedule_us: float
    t_process_us: float
    t_sent: float
    t_result: float
    forward_us: int
    idle_us: int
    rows: list[tuple[str, int, int]]
    admitted: list[_Admission]
    preempted: list[_Preemption]
    free_pages: int
    cached_pages: int
    used_pages: int
    waiting: list[tuple[str, int, str]]
    num_returned: list[int] = []  # for each row that samples; empty: one each
    num_guessed: int = 0


class Trace(NamedTuple):
    """A recorded run."""

    steps: list[MeasuredStep]
    num_pages: int
    arrivals: list[Arrival]  # as seen in steps: each has the time of the first step that mentions it


class _Seen:
    """A sequence as followed through the steps."""

    __slots__ = ("at", "input_len", "most", "num_reused", "position")

    def __init__(self, at: float) -> None:
        self.at = at
        self.input_len = 0
        self.num_reused = 0
        self.position = 0  # computed
        self.most = 0  # positions ever computed

    def arrival(self, began: float) -> Arrival:
        # The last token is sampled, and never computed.
        return Arrival(
            time=self.at - began,
            input_len=self.input_len,
            output_len=max(1, self.most - self.input_len + 1),
            prefix_id="reused" if self.num_reused else "",
            prefix_len=self.num_reused,
        )


def read_trace(path: Path) -> Trace:
    """Read a trace; if it was cut off in the middle of a line, up to that line.

    Raises:
        ConfigError: it cannot be read, has another form, or shows no steps.
    """
    steps: list[MeasuredStep] = []
    sequences: dict[Name, _Seen] = {}
    num_pages = 0
    for line in _lines(path):
        for request_id, idx, _ in line.waiting:
            sequences.setdefault((request_id, idx), _Seen(line.t_sent))
        for gone in line.preempted:
            sequences.setdefault((gone.request_id, gone.sequence_idx), _Seen(line.t_sent)).position = 0
        for entry in line.admitted:
            seen = sequences.setdefault((entry.request_id, entry.sequence_idx), _Seen(line.t_sent))
            seen.position = entry.num_reused_tokens
            if not seen.input_len:
                seen.input_len, seen.num_reused = entry.num_tokens, entry.num_reused_tokens
        decodes: list[int] = []
        chunks: list[tuple[int, int]] = []
        for i, (request_id, idx, count) in enumerate(line.rows):
            seen = sequences.setdefault((request_id, idx), _Seen(line.t_sent))
            if count == 1:
                decodes.append(seen.position)
            else:
                chunks.append((seen.position, count))
            seen.position += line.num_returned[i] if count == 1 and i < len(line.num_returned) else count
            seen.most = max(seen.most, seen.position)
        num_pages = line.free_pages + line.cached_pages + line.used_pages
        if line.num_guessed:
            continue  # device models do not cover guesses
        steps.append(
            MeasuredStep(
                StepShape(decodes, chunks),
                line.forward_us / 1e6,
                line.idle_us / 1e6,
                line.t_sent,
                line.t_result,
                (line.t_schedule_us + line.t_process_us) / 1e6,
            )
        )
    if not steps:
        raise ConfigError(f"{path} shows no steps without guesses")
    known = [seen for seen in sequences.values() if seen.input_len]
    began = min((seen.at for seen in known), default=0.0)
    return Trace(steps, num_pages, sorted((seen.arrival(began) for seen in known), key=lambda each: each.time))


def _lines(path: Path) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{path}, line {number} is no step of a trace: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
