"""A worker that takes the place of one that died: the device may not have given the other's memory back yet.

A driver frees a dead process's memory in its own time. So too little of it is no verdict on the configuration here, as
it is for a first worker: as long as memory comes back, the start is tried again.
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
"""What the memory of a dead process takes at most to come back."""

_LOOK_SECONDS = 0.1


class StillNoMemoryError(Exception):
    """It did not come back in time; the message says what has no room."""


def start_again(start: Callable[[], T], free_memory: Callable[[], int]) -> T:
    """What `start` returns, after as many tries as the memory takes to come back.

    Args:
        start: raises NoMemoryError if something does not fit.
        free_memory: bytes that could be taken now.

    Raises:
        StillNoMemoryError: it did not fit, and for as long as memory may take to come back no more came.
    """
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return start()
        except NoMemoryError as error:
            reason = str(error)
        gc.collect()  # what the failed start had taken
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        free = free_memory()
        log.warning("no memory yet, waiting for that of the worker before", free_mib=free >> 20, reason=reason)
        while free_memory() <= free and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        if time.monotonic() >= deadline:
            raise StillNoMemoryError(reason)
        wait_until_settled(free_memory)


def wait_until_settled(free_memory: Callable[[], int]) -> None:
    """Wait until free memory rises no more: what is measured then is what there is."""
    deadline = time.monotonic() + SECONDS
    before, now = -1, free_memory()
    while now > before and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        before, now = now, free_memory()
