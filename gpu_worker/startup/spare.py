"""The spare worker process: `python -m penstock.gpu_worker.startup.spare`.

It imports what a worker needs, and then waits on a socket (`--turn-fd N`). Each message there carries a worker's
arguments, and the descriptors of its pipe to the parent and of its configuration. For each message it forks a worker
(`core/launch/spare.py` is the other side). It holds no weights, no engine socket and no device, so a fork of it is as
good as a new process.

The first spare imports as fast as it can (`--eager`), because the first worker waits for it. A later one imports while
other processes serve, so it takes only idle processor time. Not every user may raise a lowered priority again, so the
priority is lowered only for a thread that ends with the import.
"""

import gc
import importlib
import json
import os
import socket
import sys
import threading
import time
import warnings
from contextlib import suppress
from types import ModuleType

from setproctitle import setproctitle

from penstock.config import Config
from penstock.config.parts import brought
from penstock.ipc import process
from penstock.ipc.parent import Parent, Word

_NICENESS = 15
_MAX_BYTES = 1 << 16  # of a worker's arguments


def main(argv: list[str]) -> int:
    """Fork workers until the supervisor is gone. In a forked worker: run it and return its exit code."""
    arguments = process.options_of(argv)
    gc.disable()  # until all is imported, which stays: looking for garbage in it takes a tenth of the time
    if "--eager" not in arguments:
        thread = threading.Thread(target=_import_in_idle_time)
        thread.start()
        thread.join()
    worker = _import_worker()  # an import error in the thread shows up here
    supervisor = int(arguments["--parent"])
    process.inherited_config(argv, Config)  # so that this process ends with the supervisor
    process.ignore_hangup()
    setproctitle("penstock-worker-spare")
    gc.freeze()  # existing objects are shared with the workers: the collector must not write to them
    gc.enable()
    Parent.of(argv).tell(Word.IMPORTED)
    turn = socket.socket(fileno=int(arguments["--turn-fd"]))
    while True:
        question, descriptors, _, _ = socket.recv_fds(turn, _MAX_BYTES, 2)
        if not descriptors:
            return 0
        if _fork_worker(supervisor):
            turn.close()
            parent_fd, config_fd = descriptors
            parent = Parent(parent_fd)
            parent.tell(Word.STARTED, os.getpid())
            if not parent.listens:  # the fork took too long, and another worker was started
                return 0
            own = ["--config-fd", str(config_fd), "--parent-fd", str(parent_fd)]
            code: int = worker.main([*own, *json.loads(question)])
            return code
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_worker(supervisor: int) -> bool:
    """Return whether this is the new process, a child of the supervisor by then; in the old process, return at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # libraries' threads tolerate a fork
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            return False
        between = os.getpid()
        if os.fork():
            os._exit(0)
    os.setpgid(0, 0)
    while os.getppid() == between:  # until the intermediate process has ended
        time.sleep(0.001)
    process.end_with_parent(supervisor)
    return True


def _import_worker() -> ModuleType:
    """Import what a worker needs, with its parts; return its main module."""
    worker = importlib.import_module("penstock.gpu_worker.__main__")
    brought("worker", importlib.import_module("penstock.gpu_worker.part").WorkerPart)
    return worker


def _import_in_idle_time() -> None:
    with suppress(OSError):  # on systems without priorities per thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    _import_worker()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
