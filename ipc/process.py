"""What all processes have in common: name, logging, configuration from the parent, and ending with the parent."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import msgspec
import setproctitle
import structlog

from penstock.ipc import faults
from penstock.ipc.logs import setup_logging

if TYPE_CHECKING:  # workers import this too, and have no event loop
    import asyncio

T = TypeVar("T")

EXIT_CONFIG = 2
"""Exit code of a process that cannot work as configured: restarting it would not help."""

_PR_SET_PDEATHSIG = 1

_ORPHAN_SECONDS = 5.0
"""How long a process may take to shut down by itself after its parent has died."""


def begin(process_name: str, level: str = "auto", log_format: str = "auto") -> None:
    """Name this process for `ps` and for its log lines, and set up logging."""
    setproctitle.setproctitle(process_name)
    setup_logging(process_name, level, log_format)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # they mean nothing here, and would end the process
        signal.signal(number, signal.SIG_IGN)
    if faults.ARMED:
        structlog.get_logger().warning("this process has injected faults", faults=[f"{f}" for f in faults.ARMED])


def open_standard_streams() -> None:
    """Open /dev/null if stdin, stdout or stderr is closed.

    Otherwise the next file or socket would get that number, and the output meant for people.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number


def pass_config(config: msgspec.Struct) -> int:
    """Put a configuration into an anonymous file that a child can inherit, and no other process can read.

    Returns the descriptor, to be passed on (`pass_fds`) and given to the child as `--config-fd`.
    """
    descriptor = os.memfd_create("penstock-config", 0)
    os.write(descriptor, msgspec.json.encode(config))
    return descriptor


def options_of(argv: list[str]) -> dict[str, str]:
    """Return what a parent passed to its child as alternating names and values."""
    return dict(zip(argv[::2], argv[1::2], strict=False))


def inherited_config(argv: list[str], config_type: type[T], *, may_say_goodbye: bool = False) -> T:
    """The configuration that the parent passed in `argv`: `--config-fd N [--parent PID]`.

    With `--parent`, this process also ends when its parent does: at once, or by SIGTERM if it may say goodbye.
    """
    arguments = options_of(argv)
    if "--parent" in arguments:
        end_with_parent(int(arguments["--parent"]), may_say_goodbye=may_say_goodbye)
    descriptor = int(arguments["--config-fd"])
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # siblings share the file's offset
    os.close(descriptor)
    return msgspec.json.decode(content, type=config_type)


def end_with_parent(expected_parent: int, *, may_say_goodbye: bool = False) -> None:
    """Let the kernel end this process when the parent dies, so that no orphan stays behind (Linux).

    It is killed, because it may be stopped or busy for long. If it may say goodbye, it gets SIGTERM first, and is
    killed a few seconds later if it still runs.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM if may_say_goodbye else signal.SIGKILL, 0, 0, 0)
    try:
        parent = os.pidfd_open(expected_parent)
    except ProcessLookupError:
        sys.exit(1)
    if os.getppid() != expected_parent:  # the parent died before the call took effect
        sys.exit(1)
    if may_say_goodbye:
        threading.Thread(target=_end_after, args=(parent,), name="orphan", daemon=True).start()
    else:
        os.close(parent)


def _end_after(parent: int) -> None:
    select.select([parent], [], [])
    time.sleep(_ORPHAN_SECONDS)
    os._exit(1)


def is_orphan(argv: list[str]) -> bool:
    """Whether the parent that `argv` names is gone."""
    parent = options_of(argv).get("--parent")
    return parent is not None and os.getppid() != int(parent)


def on_hangup(loop: "asyncio.AbstractEventLoop", reload: Callable[[], None]) -> None:
    """Make SIGHUP mean `reload`. A SIGHUP because the terminal was closed still ends the process."""
    terminal_is_gone = _terminal_watch()

    def handle() -> None:
        if terminal_is_gone():
            loop.remove_signal_handler(signal.SIGHUP)  # back to the system's default
            os.kill(os.getpid(), signal.SIGHUP)
        else:
            reload()

    loop.add_signal_handler(signal.SIGHUP, handle)


def ignore_hangup() -> None:
    """Like `on_hangup`, for a process without an event loop and with nothing to reload."""
    terminal_is_gone = _terminal_watch()

    def handle(number: int, _frame: FrameType | None) -> None:
        if terminal_is_gone():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGHUP, handle)


def _terminal_watch() -> Callable[[], bool]:
    """Return a function that tells whether this process had a terminal and has lost it."""
    terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
    return lambda: bool(terminals) and not any(os.isatty(descriptor) for descriptor in terminals)
