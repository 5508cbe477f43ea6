"""Options of the recording."""

import os
import re
from pathlib import Path
from typing import Annotated, ClassVar, Self

from msgspec import Meta
from msgspec.structs import replace

from penstock.config.engines import numbered_file
from penstock.config.groups.base import Shown
from penstock.config.options import Config, ConfigError
from penstock.config.part_options import PartOptions
from penstock.config.writable import TRIAL, try_to_write
from penstock.parts.recording.writer import may_hold_recording

_SIZED_FILE = re.compile(r"(.+):([0-9]+)")


class RecordingOptions(PartOptions, frozen=True):
    """What happened, in a file ([replay](replay.md))."""

    part: ClassVar[str] = "recording"
    title: ClassVar[str] = "Recording"
    beside: ClassVar[str] = "scheduler"
    apart_only: ClassVar[frozenset[str]] = frozenset(("record", "record_prompts", "step_trace"))

    step_trace: Annotated[
        str, Meta(description="Write one JSON line per step to this file. Empty: no trace."), Shown("PATH")
    ] = ""
    record: Annotated[
        str,
        Meta(
            description="Record requests, steps and the digests of their results to this file, which `penstock replay`"
            " reads: the last 256 MiB or, as FILE:MIB, so many, over all its files. Empty: no recording."
        ),
        Shown("PATH[:MIB]", "write down what happens, for `penstock replay`"),
    ] = ""
    record_prompts: Annotated[
        bool,
        Meta(
            description="Record the tokens of prompts and outputs too, without which nothing can be computed again. "
            "Whoever reads the file then reads what users wrote."
        ),
    ] = False

    @property
    def file(self) -> tuple[Path, int] | None:
        """The file of --record and the most MiB of all its files; None without one."""
        if not self.record:
            return None
        found = _SIZED_FILE.fullmatch(self.record)
        return (Path(self.record), 256) if found is None else (Path(found[1]), int(found[2]))

    @property
    def measured_files(self) -> tuple[str, ...]:
        """The recording and the step trace."""
        return ("" if self.file is None else str(self.file[0]), self.step_trace)

    def problem(self, config: Config) -> str:
        """A recording has room, and prompts are recorded in one."""
        if self.file is not None and self.file[1] < 1:
            return f"--record {self.record!r}: a recording has at least 1 MiB"
        return "--record-prompts has no effect without --record FILE" if self.record_prompts and not self.record else ""

    def of_engine(self, number: int) -> Self:
        """With files of its own."""
        record = "" if self.file is None else f"{numbered_file(str(self.file[0]), number)}:{self.file[1]}"
        return replace(self, record=record, step_trace=numbered_file(self.step_trace, number))

    def check_files(self) -> None:
        """Make sure that both can be written."""
        if path := self.step_trace:
            try:
                try_to_write(Path(path))
            except OSError as error:
                raise ConfigError(f"cannot write the step trace {path!r}: {error.strerror}") from None
        if self.file is not None:
            _check_recording(self.file[0])


def _check_recording(path: Path) -> None:
    """Continue an existing recording; never change any other file. Pipes and devices are not tried."""
    if path.exists() and not path.is_file():
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if may_hold_recording(path):
                size = os.fstat(file).st_size
                os.pwrite(file, TRIAL, size)
                os.ftruncate(file, size)
                return
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(f"cannot write the recording {str(path)!r}: {error.strerror}") from None
    raise ConfigError(f"--record {str(path)!r}: this file is there and is no recording")


PARTS = (RecordingOptions,)
