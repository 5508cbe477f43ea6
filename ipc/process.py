"""Habits that all processes share: name, log lines, configuration from the parent, end with the parent."""

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

if TYPE_CHECKING:  # workers come here, too, and have no event loop
    import asyncio

T = TypeVar("T")

EXIT_CONFIG = 2
"""Exit code of what cannot work as it was told to: starting it again would not help."""

_PR_SET_PDEATHSIG = 1

_ORPHAN_SECONDS = 5.0
"""What a process that may end in its own way gets for that when its parent has died."""


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


def options_of(argv: list[str]) -> dict[str, str]:
    """What a parent passed to its child: names and values in turn."""
    return dict(zip(argv[::2], argv[1::2], strict=False))


def inherited_config(argv: list[str], config_type: type[T], *, may_say_goodbye: bool = False) -> T:
    """The configuration that the parent passed in `argv`: `--config-fd N [--parent PID]`.

    With `--parent`, this process also ends when that one does: at once, or by SIGTERM if it may say goodbye.
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

    It is killed, for it may be stopped, or busy for long. If it may say goodbye, it gets SIGTERM, and is ended some
    seconds later if it is still there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM if may_say_goodbye else signal.SIGKILL, 0, 0, 0)
    try:
        parent = os.pidfd_open(expected_parent)
    except ProcessLookupError:
        sys.exit(1)
    if os.getppid() != expected_parent:  # it died before the call took effect
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
    """SIGHUP means `reload` from now on; one that comes because the terminal was closed still ends the process."""
    terminal_is_gone = _terminal_watch()

    def handle() -> None:
        if terminal_is_gone():
            loop.remove_signal_handler(signal.SIGHUP)  # back to what the system does by itself
            os.kill(os.getpid(), signal.SIGHUP)
        else:
            reload()

    loop.add_signal_handler(signal.SIGHUP, handle)


def ignore_hangup() -> None:
    """The same for a process without an event loop, and with nothing to reload."""
    terminal_is_gone = _terminal_watch()

    def handle(number: int, _frame: FrameType | None) -> None:
        if terminal_is_gone():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGHUP, handle)


def _terminal_watch() -> Callable[[], bool]:
    """A function that says whether this process had a terminal and has none any more."""
    terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
    return lambda: bool(terminals) and not any(os.isatty(descriptor) for descriptor in terminals)
