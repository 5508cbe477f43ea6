"""A frontend in a process of its own, which tells how long its event loop was silent.

As a program (`python -m tests.frontend.probed_server FOLDER ADDRESS OPTIONS`) it is that process: it writes its port,
and for each line of stdin the longest silence since the last one. What counts is time that the process itself
computed in, so that a machine that is busy with other things does not look like a slow frontend.
"""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from penstock.config import Config, FrontendOptions, IpcOptions, ModelOptions
from penstock.config.listening import bind
from tests.frontend.checkpoint_folder import VOCAB_SIZE
from tests.frontend.fake_scheduler import FakeScheduler, Script

_TICK = 0.001


@dataclass(frozen=True)
class Silence:
    """The longest time without a turn of the event loop, in seconds: what it computed of it, and as a clock saw it.

    `turn` is what the event loop's own thread computed in the costliest turn: no load of the machine changes it much.
    """

    own: float
    seen: float
    turn: float


class ProbedServer:
    """What tests see of it."""

    def __init__(self, port: int, process: "subprocess.Popen[str]") -> None:
        self.port = port
        self.process = process

    def silence(self) -> Silence:
        """The longest one since this was asked last."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return Silence(*json.loads(self.process.stdout.readline()))


@contextmanager
def probed_server(
    folder: Path, sockets: Path, *, max_model_len: int = 2048, open_files: int = 0, **options: Any
) -> Iterator[ProbedServer]:
    """Start one with these options of the frontend; a fake scheduler runs in a thread of this process.

    Each answer is 20 tokens, 10 ms apart. With `open_files` the process may have no more of them.
    """
    address = f"ipc://{sockets}/frontend.sock"
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> FakeScheduler:
        scheduler = FakeScheduler(address, vocab_size=VOCAB_SIZE, max_model_len=max_model_len)
        scheduler.script = lambda request, sequence_idx: Script([70 + i for i in range(20)], delay=0.01)
        return scheduler

    async def end() -> None:
        scheduler.close()

    scheduler = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    command = [sys.executable, "-m", "tests.frontend.probed_server", str(folder), address, json.dumps(options)]
    if open_files:
        command = ["sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh", *command]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield ProbedServer(int(process.stdout.readline()), process)
    finally:
        process.communicate()
        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Probe:
    def __init__(self) -> None:
        self._own = self._seen = self._turn = 0.0

    async def watch(self) -> None:
        seen, own, turn = time.monotonic(), time.process_time(), time.thread_time()
        while True:
            await asyncio.sleep(_TICK)
            now, used, turned = time.monotonic(), time.process_time(), time.thread_time()
            self._seen = max(self._seen, now - seen - _TICK)
            self._own = max(self._own, min(now - seen, used - own))
            self._turn = max(self._turn, turned - turn)
            seen, own, turn = now, used, turned

    def take(self) -> list[float]:
        """What was longest since the last time."""
        found = [self._own, self._seen, self._turn]
        self._own = self._seen = self._turn = 0.0
        return found


async def _serve(folder: str, address: str, options: dict[str, Any]) -> None:
    from penstock.frontend.http.server import Server

    config = Config(
        model=ModelOptions(model=folder),
        frontend=FrontendOptions(**{"port": 0, "shutdown_timeout": 1.0, **options}),
        ipc=IpcOptions(frontend_address=address),
    )
    server = Server(config, "penstock-frontend-0")
    listener = bind("127.0.0.1", 0, is_shared=False)
    await server.start(listener)
    await server.service.engine.wait_ready(10.0)
    gc.freeze()  # as a frontend's own process does
    probe = _Probe()
    watching = asyncio.create_task(probe.watch())
    print(listener.getsockname()[1], flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(json.dumps(probe.take()), flush=True)
    watching.cancel()
    await server.close()


if __name__ == "__main__":
    import structlog

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
