"""Child processes of a test, found by the names that they gave themselves."""

import contextlib

import psutil


def children_named(name: str) -> set[int]:
    """The pids of this process's living descendants whose title contains the name."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended, or ended and nobody has asked how
            if name in "".join(child.cmdline()[:1]):
                found.add(child.pid)
    return found
