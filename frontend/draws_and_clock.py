"""The sources of an answer's random ids and seeds, and of its time.

Usually both are the system's. Work that may be repeated and must then yield the same bytes (lines of batches) sets
both for its own context, which the tasks that it starts inherit.
"""

import time
from collections.abc import Callable
from contextvars import ContextVar
from random import Random, SystemRandom

DRAWS: ContextVar[Random] = ContextVar("draws", default=SystemRandom())  # noqa: B039  (it has no state)
CLOCK: ContextVar[Callable[[], float]] = ContextVar("clock", default=time.time)
"""Seconds since 1970."""
