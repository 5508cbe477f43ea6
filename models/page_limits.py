"""How long a sequence may be, by the KV pages that it needs."""

from collections.abc import Sequence
from functools import lru_cache

from penstock.ipc.messages import WindowGroup


@lru_cache(maxsize=16)  # asked for each request
def longest_sequence(num_pages: int, page_size: int, windows: tuple[WindowGroup, ...], most: int) -> int:
    """Return the most positions of a sequence, up to `most`, that fit the pool.

    Args:
        num_pages: of the pool.
        page_size: of the first group, which keeps all positions.
        windows: the other groups.
        most: the model's limit.
    """
    low, high = 0, min(most, num_pages * page_size)
    while low < high:
        middle = (low + high + 1) // 2
        if _pages_of(middle, page_size, windows) <= num_pages:
            low = middle
        else:
            high = middle - 1
    return low


def _pages_of(length: int, page_size: int, windows: Sequence[WindowGroup]) -> int:
    """The most pages that a sequence of this length holds at a time."""
    num_pages = -(-length // page_size)
    for group in windows:
        # A window may begin and end inside a page, and a page behind it is freed one page of the first group later.
        num_pages += min(-(-length // group.page_size), 2 + -(-(group.window + page_size) // group.page_size))
    return num_pages
