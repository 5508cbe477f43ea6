"""A worker that replaces one that died: the device may not have freed the dead worker's memory yet.

A driver frees a dead process's memory in its own time. For a first worker, too little memory means that the
configuration cannot work. For a replacement it does not: the start is retried as long as memory keeps coming back.
"""

import gc
import time
from collections.abc import Callable
from typing import TypeVar

import structlog
import torch

from penstock.gpu_worker.devices.out_of_memory import NoMemoryError

log = structlog.get_logger()

T = TypeVar("T")

SECONDS = 10.0
"""Longest time for the memory of a dead process to come back."""

_LOOK_SECONDS = 0.1


class StillNoMemoryError(Exception):
    """The memory did not come back in time; the message says what does not fit."""


def start_again(start: Callable[[], T], free_memory: Callable[[], int]) -> T:
    """Call `start` until the memory that it needs has come back, and return its result.

    Args:
        start: raises NoMemoryError if something does not fit.
        free_memory: bytes that are free now.

    Raises:
        StillNoMemoryError: it did not fit, and no more memory was freed within the longest time for that.
    """
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return start()
        except NoMemoryError as error:
            reason = str(error)
        gc.collect()  # frees what the failed start allocated
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        free = free_memory()
        log.warning("not enough memory yet, waiting for the previous worker's", free_mib=free >> 20, reason=reason)
        while free_memory() <= free and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        if time.monotonic() >= deadline:
            raise StillNoMemoryError(reason)
        wait_until_settled(free_memory)


def wait_until_settled(free_memory: Callable[[], int]) -> None:
    """Wait until free memory stops growing, so that it can be measured."""
    deadline = time.monotonic() + SECONDS
    before, now = -1, free_memory()
    while now > before and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        before, now = now, free_memory()
