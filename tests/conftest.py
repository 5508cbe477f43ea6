"""What holds for all tests."""

import gc
import multiprocessing
import os
from collections.abc import Generator
from pathlib import Path

import pytest

try:
    import structlog
except ImportError:  # on a GPU machine that has the kernels' own dependencies alone
    structlog = None  # type: ignore[assignment]

# Here, and in every process that a test starts, the models for tests may be served.
os.environ["PENSTOCK_TEST_MODELS"] = "tests.clockwork.family"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))

# Servers in threads log while pytest puts another object in the place of `sys.stdout`: `print` then writes to one that
# is gone, and Python 3.11 crashes. A file of our own on the same descriptor stays, and is captured all the same.
if structlog is not None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(open(1, "w", closefd=False)))  # noqa: SIM115

# What the children of tests need is imported once, by the process that they are forked from.
_OF_CHILDREN = ["torch", "tests.kernels.native.rank_processes", "tests.gpu_worker.parallel.rank_process"]
multiprocessing.get_context("forkserver").set_forkserver_preload(_OF_CHILDREN)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: looking for garbage in it, again and again, takes a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a long test come first: run by file in several processes, none is left alone with one at the end."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """What has been imported stays: collections of garbage need not look at it again for every model that is freed."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries that look for leaks when they are unloaded find none."""
    gc.unfreeze()
