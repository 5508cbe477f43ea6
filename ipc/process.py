"""Habits that all processes share: name, log lines, configuration from the parent, end with the parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec
import setproctitle
import structlog

from penstock.ipc import faults
from penstock.ipc.logs import setup_logging

if TYPE_CHECKING:  # workers come here, too, and have no event loop
    import asyncio

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1

READY = b"1"
"""What a process tells its parent once it can do its work; another number is the id of a process that hangs."""


def begin(process_name: str, level: str = "auto", log_format: str = "auto") -> None:
    """Name this process for `ps` and for its log lines, and set logging up."""
    setproctitle.setproctitle(process_name)
    setup_logging(process_name, level, log_format)
    if faults.ARMED:
        structlog.get_logger().warning("this process was started with faults", faults=[f"{f}" for f in faults.ARMED])


def open_standard_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed: else the next file or socket takes its number, and gets
    what is meant for people."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number


def pass_config(config: msgspec.Struct) -> int:
    """Put a configuration where a child can inherit it: an anonymous file, readable by nobody else.

    Returns the descriptor, to be passed on (`pass_fds`) and named to the child as `--config-fd`.
    """
    descriptor = os.memfd_create("penstock-config", 0)
    os.write(descriptor, msgspec.json.encode(config))
    return descriptor


def inherited_config(argv: list[str], config_type: type[T]) -> T:
    """The configuration that the parent passed in `argv`: `--config-fd N [--parent PID]`.

    With `--parent`, this process also ends when that one does.
    """
    arguments = dict(zip(argv[::2], argv[1::2], strict=False))
    if "--parent" in arguments:
        end_with_parent(int(arguments["--parent"]))
    descriptor = int(arguments["--config-fd"])
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # siblings share the file's offset
    os.close(descriptor)
    return msgspec.json.decode(content, type=config_type)


def end_with_parent(expected_parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies, so that no orphan stays behind (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != expected_parent:  # it died before the call took effect
        sys.exit(1)


def on_hangup(loop: "asyncio.AbstractEventLoop", reload: Callable[[], None]) -> None:
    """SIGHUP means `reload` from now on; one that comes because the terminal was closed still ends the process."""
    terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]

    def handle() -> None:
        if terminals and not any(os.isatty(descriptor) for descriptor in terminals):
            loop.remove_signal_handler(signal.SIGHUP)  # back to what the system does by itself
            os.kill(os.getpid(), signal.SIGHUP)
        else:
            reload()

    loop.add_signal_handler(signal.SIGHUP, handle)


def report_ready(argv: list[str]) -> None:
    """Tell the parent that this process can do its work, if the parent asked (`--ready-fd N`)."""
    descriptor = _ready_descriptor(argv)
    if descriptor is not None:
        os.write(descriptor, READY)
        os.close(descriptor)


def wait_for_turn(process_name: str, argv: list[str]) -> None:
    """A spare (`--turn-fd N`) waits here until it is needed; it ends if it never is."""
    value = dict(zip(argv[::2], argv[1::2], strict=False)).get("--turn-fd")
    if value is not None:
        setproctitle.setproctitle(f"{process_name}-spare")
        if not os.read(int(value), 1):
            sys.exit(0)
        os.close(int(value))


def hung_process_reporter(argv: list[str]) -> Callable[[int], None]:
    """A function that tells the parent, if it asked, that the process with this id does nothing any more."""
    descriptor = _ready_descriptor(argv)

    def report(pid: int) -> None:
        if descriptor is not None:
            with suppress(OSError):  # full or closed: the parent has other worries
                os.write(descriptor, f"{pid}\n".encode())

    if descriptor is not None:
        os.set_blocking(descriptor, False)
    return report


def _ready_descriptor(argv: list[str]) -> int | None:
    value = dict(zip(argv[::2], argv[1::2], strict=False)).get("--ready-fd")
    return None if value is None else int(value)
