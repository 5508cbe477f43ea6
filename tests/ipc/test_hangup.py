"""SIGHUP: a word to read files again, or the end of a terminal."""

import os
import pty
import signal
import subprocess
import sys

_PROCESS = """
import asyncio
from penstock.ipc import process

async def main():
    process.on_hangup(asyncio.get_running_loop(), lambda: print("reloaded", flush=True))
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def read_until(descriptor: int, word: bytes) -> None:
    seen = b""
    while word not in seen:
        seen += os.read(descriptor, 4096)


def test_on_a_terminal_that_goes() -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", _PROCESS], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        read_until(ours, b"ready")
        for _ in range(2):
            child.send_signal(signal.SIGHUP)
            read_until(ours, b"reloaded")
        os.close(ours)
        child.send_signal(signal.SIGHUP)
        assert child.wait(60) == -signal.SIGHUP
    finally:
        child.kill()
        child.wait()


def test_without_a_terminal() -> None:
    command = [sys.executable, "-c", _PROCESS]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
            for _ in range(2):
                child.send_signal(signal.SIGHUP)
                assert child.stdout.readline() == b"reloaded\n"
        finally:
            child.kill()
