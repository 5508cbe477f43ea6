"""The spare worker process: `python -m penstock.gpu_worker.spare`, with the arguments of `penstock.gpu_worker`.

It imports what a worker needs and then goes on as one, which waits for its turn. While it imports, its neighbours
serve: it has only what they leave of the processor. A priority once lowered may not be raised again by everyone, so it
is lowered for a thread that ends with the import.
"""

import importlib
import os
import sys
import threading
from contextlib import suppress

_NICENESS = 15


def main(argv: list[str]) -> int:
    """Import, then be the worker; its exit code."""
    thread = threading.Thread(target=_import_worker)
    thread.start()
    thread.join()
    worker_main = importlib.import_module("penstock.gpu_worker.__main__").main  # an error of the thread's shows here
    code: int = worker_main(argv)
    return code


def _import_worker() -> None:
    with suppress(OSError):  # of a system whose threads have no priorities of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    importlib.import_module("penstock.gpu_worker.__main__")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
