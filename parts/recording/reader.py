"""Reads recordings: joins the parts of a file, and groups their lines by run and request."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Struct

from penstock.config import ConfigError
from penstock.config.options import SchedulerOptions
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import SamplingParams, StepPlan, WorkerHello
from penstock.parts.recording.lines import (
    KINDS,
    PAGE_DIGEST_BYTES,
    VERSION,
    AnyLine,
    Arrival,
    Encoded,
    End,
    Header,
    Lost,
    Order,
    Plan,
    Result,
    Worker,
    read_back,
)

Event = Worker | Arrival | Order | Plan | Result | Encoded | End | Lost
"""The events of a run."""


class _Kind(Struct):
    kind: str


@dataclass(slots=True)
class Recorded:
    """A request, and how its sequences ended."""

    arrival: Arrival
    ends: dict[int, End] = field(default_factory=dict)  # by sequence; a missing one had not ended

    @property
    def has_tokens(self) -> bool:
        """Whether its prompt was recorded."""
        return bool(self.arrival.token_ids)

    def prompt(self) -> "array[int]":
        """The prompt's token ids; empty if they were not recorded."""
        return unpack_int32(self.arrival.token_ids)

    def known_at_first(self, seq: int) -> list[int]:
        """The tokens of a sequence at its arrival: its prompt, and its outputs of an earlier run."""
        begun = b"".join(each.token_ids for each in self.arrival.begun if each.seq == seq)
        return unpack_int32(self.arrival.token_ids + begun).tolist()

    def page_digests(self) -> list[bytes]:
        """One digest per full page of its prompt; the common beginning of two lists is what the requests share."""
        pages, size = self.arrival.pages, PAGE_DIGEST_BYTES
        return [pages[i : i + size] for i in range(0, len(pages), size)]

    def sampling(self) -> SamplingParams:
        """Its sampling parameters, without the fields that were withheld.

        Raises:
            msgspec.ValidationError: a value is not what this version expects.
        """
        return read_back(self.arrival.sampling, SamplingParams)


@dataclass(slots=True)
class Run:
    """What is known of one scheduler process."""

    header: Header  # of the oldest part that still exists
    workers: list[Worker] = field(default_factory=list)
    requests: dict[str, Recorded] = field(default_factory=dict)  # by id, in the order of arrival
    events: list[Event] = field(default_factory=list)  # in order
    num_lost: int = 0  # lines that were not written

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing, except perhaps the end."""
        return not self.num_lost and self.header.part == 0

    def hello(self) -> WorkerHello:
        """The hello of the first workers.

        Raises:
            ConfigError: there were none.
            msgspec.ValidationError: a value is not what this version expects.
        """
        if not self.workers:
            raise ConfigError("the recording has no worker: nothing was computed in it")
        return read_back(self.workers[0].hello, WorkerHello)

    def scheduler_options(self) -> SchedulerOptions:
        """The options of the run, without those that this version does not know."""
        return read_back(self.header.options["scheduler"], SchedulerOptions)

    def plans(self) -> Iterator[tuple[Plan, StepPlan]]:
        """Yield each plan, also with all columns, but without the new rows' tokens and sampling (see `Plan.new`)."""
        for event, plan in self.with_plans():
            if plan is not None and isinstance(event, Plan):
                yield event, plan

    def with_plans(self) -> Iterator[tuple[Event, StepPlan | None]]:
        """Yield all events in order; plans come with all their columns, if these can be rebuilt."""
        before: StepPlan | None = None
        for event in self.events:
            if not isinstance(event, Plan):
                yield event, None
                continue
            fields: dict[str, Any] = {name: event.columns[name] for name in event.columns if name in _COLUMNS}
            if event.is_same:
                if before is None or before.step_id != event.step - 1:
                    yield event, None  # the plan that it refers to is lost
                    continue
                start = pack_int32([position + 1 for position in unpack_int32(before.start)])
                fields |= {"rows": before.rows, "start": start, "num_new": before.num_new, "samples": before.samples}
            before = StepPlan(step_id=event.step, **fields)
            yield event, before


_COLUMNS = frozenset(StepPlan.__struct_fields__) - {"step_id", "new_rows"}


@dataclass(slots=True)
class Recording:
    """The contents of a file and its older parts."""

    runs: list[Run]  # oldest first
    num_damaged: int = 0  # unreadable lines; one at the end of a run is normal after a crash

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read FILE and its older parts FILE.1, FILE.2 ...

        Raises:
            ConfigError: there is no such file, or this version cannot read it as a recording.
        """
        recording = cls([])
        for part in parts(path):
            recording._read_part(part)
        if not recording.runs:
            raise ConfigError(f"{str(path)!r} is not a recording: no line of it is a header")
        return recording

    def requests(self) -> list[Recorded]:
        """The requests of all runs."""
        return [request for run in self.runs for request in run.requests.values()]

    def _read_part(self, path: Path) -> None:
        run: Run | None = None
        for line in self._lines(path):
            if isinstance(line, Header):
                if line.version > VERSION:
                    raise ConfigError(
                        f"{str(path)!r} was recorded in format {line.version}; this version reads up to {VERSION}"
                    )
                if not self.runs or self.runs[-1].header.run != line.run:
                    self.runs.append(Run(line))
                run = self.runs[-1]
            elif run is not None:
                _add(run, line)

    def _lines(self, path: Path) -> Iterator[AnyLine]:
        try:
            with path.open("rb") as file:
                for text in file:
                    try:
                        kind = KINDS.get(_kind.decode(text).kind)
                        if kind is not None:
                            yield _decoders[kind].decode(text)
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                        self.num_damaged += bool(text.strip())
        except OSError as error:
            raise ConfigError(f"cannot read the recording {str(path)!r}: {error.strerror}") from None


_kind = msgspec.json.Decoder(_Kind)
_decoders: dict[type[AnyLine], "msgspec.json.Decoder[AnyLine]"] = {
    kind: msgspec.json.Decoder(kind) for kind in KINDS.values()
}


def _add(run: Run, line: Event) -> None:
    run.events.append(line)
    match line:
        case Worker():
            run.workers.append(line)
        case Arrival():
            run.requests[line.id] = Recorded(line)
        case End() if line.id in run.requests:
            run.requests[line.id].ends[line.seq] = line
        case Lost():
            run.num_lost = line.num_lines


def parts(path: Path) -> list[Path]:
    """The existing files of a recording, oldest first."""
    older: list[Path] = []
    while (each := path.with_name(f"{path.name}.{len(older) + 1}")).is_file():
        older.append(each)
    return [*reversed(older), path]
