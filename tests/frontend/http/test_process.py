"""The process: quick to start, free of torch, one clear sentence when it cannot, a drain when it ends."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config import Config, FrontendOptions, IpcOptions, LogOptions, ModelOptions
from penstock.config.listening import bind
from penstock.ipc import process
from tests.frontend.checkpoint_folder import VOCAB_SIZE
from tests.frontend.fake_scheduler import FakeScheduler, Script


def config(folder: Path, sockets: Path, **frontend: object) -> Config:
    return Config(
        model=ModelOptions(model=str(folder)),
        frontend=FrontendOptions(**{"port": 0, **frontend}),  # type: ignore[arg-type]
        ipc=IpcOptions(frontend_address=f"ipc://{sockets}/frontend.sock", runtime_dir=str(sockets)),
        log=LogOptions(log_format="json"),
    )


class Frontend:
    """The running process and its log lines."""

    def __init__(self, child: asyncio.subprocess.Process, ready_fd: int) -> None:
        self.child = child
        self._ready_fd = ready_fd
        self.lines: list[dict[str, object]] = []

    @staticmethod
    async def start(config: Config, index: int = 3, metrics_fd: int | None = None) -> "Frontend":
        config_fd = process.pass_config(config)
        ready_read, ready_write = os.pipe()
        argv = ["--config-fd", str(config_fd), "--parent-fd", str(ready_write), "--index", str(index)]
        shared = () if metrics_fd is None else (metrics_fd,)
        argv += [word for descriptor in shared for word in ("--metrics-fd", str(descriptor))]
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.frontend",
            *argv,
            pass_fds=(config_fd, ready_write, *shared),
            stderr=asyncio.subprocess.PIPE,
        )
        os.close(config_fd)
        os.close(ready_write)
        return Frontend(child, ready_read)

    async def words(self, until: bytes = b"") -> set[bytes]:
        """What it told its parent up to a word, or to its end."""
        loop, told = asyncio.get_running_loop(), b""
        while until not in told.split() and (more := await loop.run_in_executor(None, os.read, self._ready_fd, 4096)):
            told += more
        os.close(self._ready_fd)
        return set(told.split())

    async def log_line(self, event: str) -> dict[str, object]:
        assert self.child.stderr is not None
        while line := await asyncio.wait_for(self.child.stderr.readline(), 60):
            self.lines.append(json.loads(line))
            if self.lines[-1]["event"] == event:
                return self.lines[-1]
        raise AssertionError(f"no {event!r} in {self.lines}")


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def copy_without(folder: Path, left_out: str, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        if path.name != left_out:
            (target / path.name).write_bytes(path.read_bytes())
    return target


async def test_life(checkpoint: Path, sockets: Path) -> None:
    frontend = await Frontend.start(config(checkpoint, sockets, shutdown_timeout=5.0))
    scheduler = FakeScheduler(f"ipc://{sockets}/frontend.sock", vocab_size=VOCAB_SIZE)
    try:
        listening = await frontend.log_line("listening")
        assert await frontend.words(until=b"ready") >= {b"ready"}
        assert name_of(frontend.child.pid).startswith("penstock-frontend-3")
        scheduler.script = lambda request, i: Script([5, 6, 7, 8], delay=0.1)
        body = b'{"prompt": "Hello", "stream": true}'
        reader, writer = await asyncio.open_connection("127.0.0.1", int(str(listening["port"])))
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-request-id: my-id\r\n"
        head += f"Content-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
        await reader.readuntil(b"data: ")
        frontend.child.terminate()
        assert b"[DONE]" in await asyncio.wait_for(reader.read(), 60)
        writer.close()
        line = await frontend.log_line("request")
        assert (line["request_id"], line["process"], line["status"]) == ("my-id", "penstock-frontend-3", 200)
        assert line["output_tokens"] == 5
        await frontend.log_line("frontend stopped")
        assert await asyncio.wait_for(frontend.child.wait(), 60) == 0
    finally:
        if frontend.child.returncode is None:
            frontend.child.kill()
            await frontend.child.wait()
        scheduler.close()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("tokenizer.json", "has no tokenizer.json"),
        ("config.json", "not a checkpoint folder"),
    ],
)
async def test_a_checkpoint_that_cannot_be_served(checkpoint: Path, sockets: Path, spoil: str, reason: str) -> None:
    folder = copy_without(checkpoint, spoil, sockets / "model")
    frontend = await Frontend.start(config(folder, sockets))
    line = await frontend.log_line("cannot start")
    assert reason in str(line["reason"])
    assert await frontend.child.wait() == 2
    assert not await frontend.words()


async def test_a_port_in_use(checkpoint: Path, sockets: Path) -> None:
    async with await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        frontend = await Frontend.start(config(checkpoint, sockets, port=port))
        line = await frontend.log_line("cannot start")
        assert line["reason"] == f"cannot listen on 127.0.0.1:{port}: Address already in use"
        assert await frontend.child.wait() == 2
        assert not await frontend.words()


async def test_two_frontends_share_their_ports(checkpoint: Path, sockets: Path) -> None:
    """Both take connections, on either of the two ports. (What one counts for all: tests/e2e/test_frontends.py.)"""
    with bind("127.0.0.1", 0, is_shared=True) as reserved, bind("127.0.0.1", 0, is_shared=True) as reserved_admin:
        port, admin_port = reserved.getsockname()[1], reserved_admin.getsockname()[1]
        shared = config(checkpoint, sockets, port=port, admin_port=str(admin_port), num_frontends=2)
        scheduler = FakeScheduler(f"ipc://{sockets}/frontend.sock", vocab_size=VOCAB_SIZE)
        metrics_fd = os.memfd_create("metrics")
        frontends = [await Frontend.start(shared, index, metrics_fd) for index in range(2)]
        os.close(metrics_fd)
        try:
            for frontend in frontends:
                assert await frontend.words(until=b"ready") >= {b"ready"}
            for _ in range(40):
                assert b" 200 OK" in await exchange(port, "POST", "/v1/completions", b'{"prompt": "Hello"}')
            assert {request.request_id.split(":")[0] for request in scheduler.added} == {
                "penstock-frontend-0",
                "penstock-frontend-1",
            }
            await asyncio.sleep(1.5)  # what the other has counted is at most a second old
            for _ in range(4):
                assert b" 404 " in await exchange(port, "GET", "/metrics")
                metrics = (await exchange(admin_port, "GET", "/metrics")).decode()
                assert 'penstock_requests_total{endpoint="/v1/completions",status="200"} 40.0' in metrics
            for frontend in frontends:
                frontend.child.terminate()
                assert await asyncio.wait_for(frontend.child.wait(), 60) == 0
        finally:
            for frontend in frontends:
                if frontend.child.returncode is None:
                    frontend.child.kill()
                    await frontend.child.wait()
            scheduler.close()


async def exchange(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    """One request on a connection of its own; the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


def test_no_heavy_imports() -> None:
    heavy = ("torch", "transformers", "numpy", "penstock.models.families.registry")
    code = f"import sys, penstock.frontend.http.server; print([name for name in {heavy} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    assert output.strip() == "[]"
