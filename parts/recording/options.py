"""Options of the recording."""

import os
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


class RecordingOptions(PartOptions, frozen=True):
    """What happened, in a file ([replay](replay.md))."""

    part: ClassVar[str] = "recording"
    title: ClassVar[str] = "Recording"
    beside: ClassVar[str] = "scheduler"
    apart_only: ClassVar[frozenset[str]] = frozenset(("record", "record_mib", "record_prompts", "step_trace"))

    step_trace: Annotated[
        str, Meta(description="Write one JSON line per step to this file. Empty: no trace."), Shown("PATH")
    ] = ""
    record: Annotated[
        str,
        Meta(
            description="Record requests, steps and the digests of their results to this file, which `penstock replay`"
            " reads. Empty: no recording."
        ),
        Shown("PATH", "write down what happens, for `penstock replay`"),
    ] = ""
    record_mib: Annotated[
        int,
        Meta(
            description="Size of the recording in MiB, over all its files. The oldest lines are dropped for new ones.",
            ge=1,
        ),
    ] = 256
    record_prompts: Annotated[
        bool,
        Meta(
            description="Record the tokens of prompts and outputs too, without which nothing can be computed again. "
            "Whoever reads the file then reads what users wrote."
        ),
    ] = False

    @property
    def measured_files(self) -> tuple[str, ...]:
        """The recording and the step trace."""
        return (self.record, self.step_trace)

    def problem(self, config: Config) -> str:
        """Prompts are recorded in a recording."""
        return "--record-prompts has no effect without --record FILE" if self.record_prompts and not self.record else ""

    def of_engine(self, number: int) -> Self:
        """With files of its own."""
        return replace(
            self, record=numbered_file(self.record, number), step_trace=numbered_file(self.step_trace, number)
        )

    def check_files(self) -> None:
        """Make sure that both can be written."""
        if path := self.step_trace:
            try:
                try_to_write(Path(path))
            except OSError as error:
                raise ConfigError(f"cannot write the step trace {path!r}: {error.strerror}") from None
        if self.record:
            _check_recording(Path(self.record))


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
