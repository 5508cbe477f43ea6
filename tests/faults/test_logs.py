"""A log that cannot be written stops nothing: the server answers, and what dies comes back."""

import asyncio
import contextlib
import fcntl
import os
import pty
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.servers import START_SECONDS
from tests.faults.clockwork import expected_tokens, make_clockwork
from tests.faults.soak import IS_SOAK, only_in_soak

PROMPT = [40, 41, 42]
KILLED = ("penstock-worker-0", "penstock-scheduler", "penstock-frontend-0")
NUM_CHATS = 60  # one line each: many times what a pipe of one page holds


@contextlib.asynccontextmanager
async def serving_into(stderr: int, folder: Path, *flags: str, is_session: bool = False) -> AsyncIterator[str]:
    """A server with this descriptor as its stdout and stderr; its URL. Ended with SIGTERM, exit code checked."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "penstock.cli",
        "serve",
        str(folder),
        "--port",
        str(port),
        *flags,
    ]
    environment = os.environ | {"PENSTOCK_SPARE_WORKER": "false", "PENSTOCK_CPU_KERNELS": "torch"}
    process = await asyncio.create_subprocess_exec(
        *command,
        "--served-model-name",
        "m",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stderr,
        stderr=stderr,
        env=environment,
        start_new_session=is_session,  # a terminal that closes does not end it, as after `nohup`
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as http:
            await until_ready(http, url)
        yield url
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            await process.wait()


async def until_ready(http: aiohttp.ClientSession, url: str) -> None:
    """Its log cannot tell."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


async def check_serving(http: aiohttp.ClientSession, url: str, num_chats: int) -> None:
    """Requests are answered, and rightly."""
    body: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    for _ in range(num_chats):
        async with asyncio.timeout(60), http.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["token_ids"] == expected_tokens(PROMPT, 4)


async def check_survival(url: str) -> None:
    """It serves on; then the worker is killed (in the long form each process), and it serves again."""
    port = int(url.rpartition(":")[2])
    async with aiohttp.ClientSession() as http:
        await check_serving(http, url, NUM_CHATS)
        for name in KILLED if IS_SOAK else KILLED[:1]:
            process(name, port).kill()
            await until_ready(http, url)
            await check_serving(http, url, 3)


def process(name: str, port: int) -> psutil.Process:
    """The process of this name below the supervisor that serves at this port."""
    for supervisor in psutil.Process().children():
        if any(c.laddr.port == port for child in supervisor.children() for c in child.net_connections("tcp")):
            return next(child for child in supervisor.children() if child.cmdline()[:1] == [name])
    raise AssertionError(f"nobody serves at {port}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_clockwork(tmp_path / "clockwork")


async def test_nobody_reads_the_pipe(folder: Path) -> None:
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    try:
        async with serving_into(write_end, folder) as url:
            await check_survival(url)
    finally:
        os.close(write_end)
        os.close(read_end)


@only_in_soak
async def test_the_reader_has_left(folder: Path) -> None:
    read_end, write_end = os.pipe()
    try:
        async with serving_into(write_end, folder) as url:
            os.close(read_end)
            await check_survival(url)
    finally:
        os.close(write_end)


async def test_the_disk_is_full(folder: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        async with serving_into(full, folder) as url:
            await check_survival(url)
    finally:
        os.close(full)


@only_in_soak
async def test_the_terminal_is_gone(folder: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        async with serving_into(theirs, folder, "--log-level", "info", is_session=True) as url:
            os.close(theirs)
            os.close(ours)
            await check_survival(url)
    finally:
        for descriptor in (ours, theirs):
            with contextlib.suppress(OSError):
                os.close(descriptor)
