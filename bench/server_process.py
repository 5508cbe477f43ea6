"""Starts a server, waits until it answers, and ends it with everything that it started."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_SECONDS = 0.1
_STOP_SECONDS = 60.0


def free_port() -> int:
    """A port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str | Path], ready_url: str, env: Mapping[str, str], start_seconds: float, log: Path | None = None
) -> Iterator[float]:
    """The command's process group, until `ready_url` answers 200; the seconds that took.

    Raises:
        RuntimeError: if it ends, or is not ready in time; with its last lines if they go to `log`.
    """
    began = time.monotonic()
    with open(log or os.devnull, "wb") as output:
        told = output if log else None
        process = subprocess.Popen(command, env=env, stdout=told, stderr=told, start_new_session=True)
    try:
        wait_until_ready(process, ready_url, began + start_seconds)
        yield time.monotonic() - began
    except RuntimeError as error:
        if log and process.poll() is not None:
            last = "\n    ".join(log.read_text(errors="replace").splitlines()[-8:])
            raise RuntimeError(f"{error} (all it said is in {log}):\n    {last}") from None
        raise
    finally:
        stop(process)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, deadline: float) -> None:
    """Poll until the address answers 200.

    Raises:
        RuntimeError: if the process ends, or the deadline (monotonic seconds) passes.
    """
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(_POLL_SECONDS)
    raise RuntimeError("the server was not ready in time")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process; whatever of its group is left after that is killed."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
