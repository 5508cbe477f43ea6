"""What a plan asks of the process that measures (`python -m penstock.calibration`), and how."""

import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from penstock.core.config.options import ConfigError
from penstock.core.planning.costs import Chunk

T = TypeVar("T")


class Describe(msgspec.Struct, frozen=True, tag=True):
    """This machine: a `Machine`."""

    machines: str | None = None  # a file with more that it may turn out to be
    again: bool = False  # measure now, whatever is kept


class Remeasure(msgspec.Struct, frozen=True, tag=True):
    """This machine's processor, now, by made-up models that stay loaded: a `Machine`."""


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """A model, with random weights if it has none of its own: `Loaded`."""

    model: str
    options: dict[str, Any]


class Run(msgspec.Struct, frozen=True, tag=True):
    """So many prompts of this length at once, and so many tokens for each after the first: `Ran`."""

    batch: int
    context: int
    num_steps: int


class MemoryRate(msgspec.Struct, frozen=True, tag=True):
    """Bytes per second that the processor reads from memory now: a float."""


class MeasurePace(msgspec.Struct, frozen=True, tag=True):
    """How quick the processor is now, beside what was last measured: a `Pace`."""


class Memory(msgspec.Struct, frozen=True, tag=True):
    """Bytes of the process that are in memory: an int."""


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """What torch and the kernels find here: `Installation`."""


Request = Describe | Remeasure | LoadModel | Run | MemoryRate | MeasurePace | Memory | Inspect


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """What torch and the kernels find here; what is not there is empty."""

    torch: str  # versions
    triton: str
    cuda: str  # that torch is built for
    cuda_error: str  # why it cannot be used
    driver: str  # version
    gpus: Sequence[tuple[str, int]]  # names and bytes of memory
    num_threads: int  # of a worker on this CPU
    compiler: str
    library: str  # of the native CPU kernels
    family: str  # of processors that it is compiled for; empty: this very one
    multiplies_tiles: bool  # of bf16 matrices, in one instruction


class Loaded(msgspec.Struct, frozen=True):
    """A model that is ready."""

    device: str
    dtype: str
    seconds: float


class Ran(msgspec.Struct, frozen=True):
    """The steps of a run and their seconds: those with prompts, then the median of those with the whole batch."""

    steps: Sequence[tuple[Sequence[Chunk], float]]


class Measurer:
    """The process. It is asked one thing at a time, and ends with the block."""

    def __enter__(self) -> "Measurer":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.calibration"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if kind is not None:
            self._process.kill()
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def ask(self, request: Request, answer: type[T]) -> T:
        """Wait for the answer.

        Raises:
            ConfigError: it cannot be done, with the reason.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = b""
        if not line:
            raise ConfigError("the process that measures has ended")
        said = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        if "error" in said:
            raise ConfigError(msgspec.json.decode(said["error"], type=str))
        return msgspec.json.decode(said["answer"], type=answer)
