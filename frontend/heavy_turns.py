"""Steps of large requests, one in each turn of the event loop.

Each such step is short enough by itself, but those of several requests that are ready at once would run one after the
other in the same turn, and keep all others waiting as if they were one step.
"""

import asyncio
from weakref import WeakKeyDictionary

LARGE_BYTES = 256 << 10
"""From this size on, what a step reads counts as large: it takes milliseconds."""

_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def heavy_turn(num_bytes: int = LARGE_BYTES) -> None:
    """Wait for a turn of the event loop in which no other large step runs; at once if the caller's is not large."""
    if num_bytes < LARGE_BYTES:
        return
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        await asyncio.sleep(0)
