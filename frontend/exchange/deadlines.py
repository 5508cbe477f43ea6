"""How long a request may take: what its client asks for in a header, and never more than the server allows.

The frontend that took the request decides, on its own monotonic clock: it alone sees all of a request's time, from its
first byte on. (How long a request waits for a row is the scheduler's to judge: `core/engine/queue_timeouts.py`.)
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.frontend.errors import DeadlineExceeded, InvalidParameter

HEADER = "x-request-timeout"

_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def allowed_seconds(given: str | None, most: float) -> float | None:
    """Seconds that a request may take, by its header and `--max-request-timeout` (0: no bound); None for no limit.

    Raises:
        InvalidParameter: if the header is no positive number.
    """
    if given is None:
        return most or None
    seconds = float(given) if _SECONDS.fullmatch(given) else 0.0
    if seconds <= 0:
        raise InvalidParameter(f"{HEADER} must be a positive number of seconds, got {given[:64]!r}", param=HEADER)
    return min(seconds, most) if most else seconds


def exceeded(seconds: float) -> DeadlineExceeded:
    """The error of a request that took so long."""
    return DeadlineExceeded(f"the request was not finished within {seconds:g} s")


@asynccontextmanager
async def within(seconds: float | None) -> AsyncIterator[None]:
    """Bound what is done before an answer's first byte.

    Raises:
        DeadlineExceeded: when the time is over; what was under way has been cancelled.
    """
    try:
        async with asyncio.timeout(seconds) as timer:
            yield
    except TimeoutError:
        if seconds is None or not timer.expired():
            raise
        raise exceeded(seconds) from None
