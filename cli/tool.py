"""Runs the module of a command (`python -m penstock.cli.tool MODULE ...`), so that all of them end alike.

Ctrl-C, and a reader that has seen enough (`penstock models | head -1`), end a command. They are no faults of it, so
nothing about them is printed.
"""

import os
import runpy
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE


def main() -> None:
    """Run the module that the first argument names, with the others as its arguments."""
    module = sys.argv[1]
    del sys.argv[1]
    try:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            sys.stdout.flush()  # now, because a reader that is gone would be complained about at the end
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write has no reader
        sys.exit(UNREAD)


if __name__ == "__main__":
    main()
