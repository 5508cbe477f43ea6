"""POST /debug/simulate: the simulator, in a process that can be killed, over a recording that was sent or picked.

The process's time and memory are limited, there is only one at a time, and it ends when its client leaves. It refuses
the same things as on the command line, in the same words; in addition it writes no files and imports no modules.
"""

import asyncio
import os
import re
import resource
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from penstock.frontend.api.body import decode
from penstock.frontend.api.service import Service
from penstock.frontend.errors import InvalidParameter, Overloaded, SimulationFailed
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.parts.watching.frontend.shapes import SIMULATION, RecordingList, RecordingShape, SimulationRequest

MAX_SECONDS = 120.0
MAX_MEMORY = 4 << 30
"""Limit for the process's address space, in bytes."""

MAX_RECORDING = 256 << 20
"""Limit for a picked recording, in bytes; one that is sent is limited like all bodies (--max-body-bytes)."""

MAX_ANSWER = 16 << 20

_NAME = re.compile(r"[^\s:=-][^:=\n]{0,39}")
_SAID = "penstock simulate: "
_lock = asyncio.Lock()


async def list_recordings(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /debug/recordings: what the server writes with --record or --step-trace, if this process can read it."""
    found = [RecordingShape(name, path.stat().st_size) for name, path in _recordings(service).items()]
    return Reply(msgspec.json.encode(RecordingList(found)))


async def simulate(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /debug/simulate

    Raises:
        InvalidParameter: the request is not valid.
        SimulationFailed: the simulator refuses the request, or takes too long or too much memory.
        Overloaded: another simulation is running.
    """
    asked = decode(SIMULATION, body)
    for name in asked.configs:
        if not _NAME.fullmatch(name):
            raise InvalidParameter(
                f"configs: {name[:64]!r} is no name: 1 to 40 characters without ':' and '=', and no '-' at first",
                param="configs",
            )
    if bool(asked.recording) == bool(asked.picked):
        raise InvalidParameter("either `recording` or `picked` must name a load", param="recording")
    if _lock.locked():
        raise Overloaded("a simulation is running; there is one at a time", retry_after=10)
    async with _lock, _file_of(service, asked) as path:
        return Reply(await _run(asked, path))


@asynccontextmanager
async def _file_of(service: Service, asked: SimulationRequest) -> AsyncIterator[Path]:
    if asked.picked:
        known = _recordings(service)
        if asked.picked not in known:
            names = ", ".join(known) or "none: the server was started without --record"
            raise InvalidParameter(f"there is no recording {asked.picked[:64]!r}; there is: {names}", param="picked")
        path = known[asked.picked]
        if path.stat().st_size > MAX_RECORDING:
            raise SimulationFailed(f"the recording has more than {MAX_RECORDING >> 20} MiB", param="picked")
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="penstock-simulation-") as folder:
        path = Path(folder) / "recording"
        await asyncio.to_thread(path.write_text, asked.recording)
        yield path


async def _run(asked: SimulationRequest, path: Path) -> bytes:
    command = [sys.executable, "-m", "penstock.cli", "simulate", "--served", "--measured", str(path)]
    command += [f"--speed={asked.speed!r}", f"--seed={asked.seed}"]
    command += [f"--ttft={asked.ttft_ms!r}"] * bool(asked.ttft_ms) + [f"--tpot={asked.tpot_ms!r}"] * bool(asked.tpot_ms)
    command += [f"--config={name}: {options}" for name, options in asked.configs.items()]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        if hasattr(resource, "prlimit"):
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        async with asyncio.timeout(MAX_SECONDS):
            told, said = await _answer(process)
            code = await process.wait()
    except TimeoutError:
        raise SimulationFailed(f"the simulation takes longer than {MAX_SECONDS:g} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
            await _answer(process)  # its pipes are closed once they are empty
    if code or len(told) > MAX_ANSWER:
        raise SimulationFailed(_why(said.decode(errors="replace"), path))
    return told


async def _answer(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """What the process writes until it ends: the answer (stdout), and its messages (stderr)."""
    assert process.stdout is not None
    assert process.stderr is not None
    told, said = await asyncio.gather(_read(process.stdout, MAX_ANSWER), _read(process.stderr, 1 << 16))
    return told, said


async def _read(stream: asyncio.StreamReader, most: int) -> bytes:
    """All of a stream; if it is longer than `most` bytes, its first `most` + 1 bytes."""
    kept = b""
    while part := await stream.read(1 << 16):
        kept += part[: most + 1 - len(kept)]
    return kept


def _why(said: str, path: Path) -> str:
    """The simulator's own sentence."""
    found = [line for line in said.splitlines() if line.startswith(_SAID)]
    sentence = found[-1].removeprefix(_SAID) if found else ""
    if "MemoryError" in said or not sentence:
        sentence = f"the simulation ended early: it may have needed more than {MAX_MEMORY >> 30} GiB"
    return sentence.removeprefix("error: ").replace(str(path), "the recording")


def _recordings(service: Service) -> dict[str, Path]:
    paths = [Path(each) for part in service.config.of_parts() for each in part.measured_files if each]
    return {path.name: path for path in paths if path.is_file() and os.access(path, os.R_OK)}
