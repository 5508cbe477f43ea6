"""The requests of a plan to the process that measures (`python -m penstock.lab.calibration`)."""

import select
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from penstock.config.options import ConfigError
from penstock.lab.planning.costs import Chunk

T = TypeVar("T")


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Describe this machine. The answer is a `Machine`."""

    machines: str | None = None  # a file with more known machines
    again: bool = False  # measure now, even if there are stored results


class Remeasure(msgspec.Struct, frozen=True, tag=True):
    """Measure this machine's processor now, with made-up models that stay loaded. The answer is a `Machine`."""


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """Load a model, with random weights if it has none. The answer is `Loaded`."""

    model: str
    options: dict[str, Any]


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run prompts of one length at once, with some output tokens after the first. The answer is `Ran`."""

    batch: int
    context: int
    num_steps: int


class MemoryRate(msgspec.Struct, frozen=True, tag=True):
    """Measure the bytes per second that the processor reads from memory now. The answer is a float."""


class MeasurePace(msgspec.Struct, frozen=True, tag=True):
    """Measure how quick the processor is now, relative to the last measurement. The answer is a `Pace`."""


class Memory(msgspec.Struct, frozen=True, tag=True):
    """Return the process's resident bytes, an int."""


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Report what torch and the kernels find here. The answer is an `Installation`."""


Request = Describe | Remeasure | LoadModel | Run | MemoryRate | MeasurePace | Memory | Inspect


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """What torch and the kernels find here; missing things are empty."""

    torch: str  # versions
    triton: str
    cuda: str  # the version that torch is built for
    cuda_error: str  # why CUDA cannot be used
    driver: str  # version
    gpus: Sequence[tuple[str, int]]  # names and bytes of memory
    num_threads: int  # threads of a worker on this CPU
    compiler: str
    library: str  # the file of the native CPU kernels
    family: str  # the family of processors that it is compiled for; empty: exactly this one
    multiplies_tiles: bool  # whether an instruction multiplies tiles of bf16 matrices


class Loaded(msgspec.Struct, frozen=True):
    """A model that is ready."""

    device: str
    dtype: str
    seconds: float


class Ran(msgspec.Struct, frozen=True):
    """The steps of a run and their seconds: the steps with prompts, then the median step of the whole batch."""

    steps: Sequence[tuple[Sequence[Chunk], float]]


class SlowError(ConfigError):
    """The answer takes longer than the caller waits."""


class Measurer:
    """The measuring process. It answers one request at a time, and ends with the `with` block."""

    def __enter__(self) -> "Measurer":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.lab.calibration"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
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

    def ask(self, request: Request, answer: type[T], patience: float | None = None) -> T:
        """Send a request and wait for the answer, at most `patience` seconds.

        Raises:
            SlowError: it took longer; the process that measures has been ended.
            ConfigError: it cannot be done; the message has the reason.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], patience)[0]:
                self._process.kill()
                raise SlowError(f"no answer within {patience:g} s")
            line = self._process.stdout.readline()
        except OSError:
            line = b""
        if not line:
            raise ConfigError("the process that measures has ended")
        said = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        if "error" in said:
            raise ConfigError(msgspec.json.decode(said["error"], type=str))
        return msgspec.json.decode(said["answer"], type=answer)
