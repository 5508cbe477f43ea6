"""How many files a reader of one request meets: `python -m tests.request_path`.

Starts a server of the demo model, sends one streaming chat request when all is quiet, and prints the files of Penstock
in which a function ran meanwhile, process by process. Processes are watched by a profile hook, which a
`sitecustomize.py` in a temporary folder brings into each of them; it answers over a socket, because some may not write
files.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.e2e.servers import serving, stream
from tests.internal_fields import internal

ROOT = Path(__file__).parent.parent
FOLDERS = ("config", "core", "frontend", "gpu_worker", "ipc", "kernels", "models", "parts")

_HOOK = """
import os, socket, sys, threading

found, is_on = set(), False

def note(frame, event, argument):
    if is_on:
        found.add(frame.f_code.co_filename)

def talk():
    global is_on
    with socket.socket(socket.AF_UNIX) as parent:
        parent.connect(os.environ["REQUEST_PATH_SOCKET"])
        parent.sendall(b"%d\\n" % os.getpid())
        parent.recv(1)
        is_on = True
        parent.sendall(b"on\\n")
        parent.recv(1)
        is_on = False
        parent.sendall("\\0".join(found).encode() + b"\\n")

def begin():
    sys.setprofile(note)
    threading.setprofile(note)
    threading.Thread(target=talk, daemon=True).start()

begin()
os.register_at_fork(after_in_child=begin)
"""


class Watch:
    """The processes that have connected, and their files."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []
        self._processes: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A process has started, or another program in its place."""
        self._writers.append(writer)
        if line := await reader.readline():
            self._processes[int(line)] = (reader, writer)

    async def tell_all(self) -> dict[int, str]:
        """Begin with all processes that live, or end; what each says to it."""
        told = {}
        for pid, (reader, writer) in list(self._processes.items()):
            if psutil.pid_exists(pid):
                writer.write(b"!")
                if line := await reader.readline():
                    told[pid] = line.decode().rstrip("\n")
        return told

    async def close(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.close()
            with suppress(OSError):  # the process has ended
                await writer.wait_closed()


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[tuple[Watch, dict[str, str]]]:
    """A watch, and the environment of processes that are to be watched."""
    (folder / "sitecustomize.py").write_text(_HOOK)
    address = str(folder / "socket")
    watch = Watch()
    server = await asyncio.start_unix_server(watch.connected, address, limit=1 << 20)
    async with server:
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        yield watch, {"PYTHONPATH": path, "REQUEST_PATH_SOCKET": address}
        await watch.close()


def own_files(paths: str) -> list[str]:
    """Those of Penstock, relative to its root."""
    found = {Path(path).resolve() for path in paths.split("\0") if "penstock" in path or str(ROOT) in path}
    own = [path.relative_to(ROOT) for path in found if path.is_relative_to(ROOT)]
    return sorted(str(path) for path in own if path.parts[0] in FOLDERS)


async def files_of_a_request(**fields: Any) -> dict[str, list[str]]:
    """Process -> the files in which a function ran for one streaming chat request with these fields."""
    body = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 24, **fields}
    quiet = ("--heartbeat-timeout", "200")  # so that nothing else is said meanwhile
    with tempfile.TemporaryDirectory() as folder:
        async with (
            watched(Path(folder)) as (watch, environment),
            serving(ROOT / "demo/model", *quiet, **environment, **internal(max_heartbeat_interval=20.0)) as server,
            aiohttp.ClientSession() as client,
        ):
            for number in range(3):  # the first ones import and start what the others find
                if number == 2:
                    await asyncio.sleep(2)
                    await watch.tell_all()
                assert [event async for event in stream(client, f"{server.url}/v1/chat/completions", body)]
            files = {pid: own_files(paths) for pid, paths in (await watch.tell_all()).items()}
            return {psutil.Process(pid).cmdline()[0]: found for pid, found in files.items() if found}


if __name__ == "__main__":
    processes = asyncio.run(files_of_a_request())
    for process, paths in processes.items():
        print(f"{process}: {len(paths)}", *paths, sep="\n    ")
    print("in all:", len({path for paths in processes.values() for path in paths}))
