"""The first spare, started as soon as the options are known: it imports while the checkpoint is checked."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.config import Config
from penstock.ipc import process

SPARE_WORKER = "penstock.gpu_worker.startup.spare"
"""What a spare runs."""


def has_spare(config: Config) -> bool:
    """Whether this machine's workers are forked off a spare."""
    return config.worker.spare_worker and config.parallel.launcher == "local"


class EarlySpare:
    """A spare that nobody has asked for a worker yet."""

    def __init__(self, module: str, config: Config) -> None:
        """Start it; the arguments are as for `Spare`."""
        self.turn, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        """The socket that takes questions."""
        self.pipe, its_pipe = os.pipe()
        """Our end of the pipe over which it reports."""
        self.is_taken = False
        """Whether somebody else ends it, and closes both."""
        config_fd = process.pass_config(config)
        given = {"--config-fd": config_fd, "--parent-fd": its_pipe, "--turn-fd": theirs.fileno()}
        argv = [word for name, descriptor in given.items() for word in (name, str(descriptor))]
        argv += ["--parent", str(os.getpid()), "--eager", "1"]
        for descriptor in given.values():
            os.set_inheritable(descriptor, True)
        try:
            self.pid = os.posix_spawn(sys.executable, [sys.executable, "-m", module, *argv], os.environ, setpgroup=0)
        finally:
            theirs.close()
            os.close(its_pipe)
            os.close(config_fd)

    def end(self) -> None:
        """End it, unless somebody has taken it."""
        if not self.is_taken:
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so this is no other process
            os.waitpid(self.pid, 0)
            self.turn.close()
            os.close(self.pipe)


@contextmanager
def early_spare(config: Config) -> Iterator[EarlySpare | None]:
    """A spare for a launch with this configuration, which ends with the block unless it is taken."""
    try:
        early = EarlySpare(SPARE_WORKER, config) if has_spare(config) else None
    except OSError:  # a later one may be started
        early = None
    try:
        yield early
    finally:
        if early is not None:
            early.end()
