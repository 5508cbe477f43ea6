"""The scheduler's bookkeeping of the places for pages on the disk.

    unlisted ──▶ free ──▶ moving ──▶ cached      found by key; the least recently used is overwritten first
                   ▲         │  ▲       │
                   └─────────┘  └───────┘        while a page is written or read, its place is not reused

The worker lists in pieces what its folder already holds; until the last piece, places not listed yet are not used.
Keys are valid beyond this process and its worker, so a place that fails simply becomes free again.
"""

from collections import OrderedDict
from collections.abc import Iterable


class DiskTier:
    """Free list and keys of `num_places` places; every operation is O(1), except `end_list` and `drop_cached`."""

    __slots__ = ("_free", "_idle", "_moving", "_unlisted", "is_listed", "num_places", "num_unusable")

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.is_listed = False  # the worker has listed all that is there
        self.num_unusable = 0  # places that stay empty
        self._unlisted = set(range(num_places))
        self._free: list[int] = []
        self._idle: OrderedDict[bytes, int] = OrderedDict()  # cached places by key, least recently used first
        self._moving: dict[bytes, int] = {}  # places that are written or read, by key

    @property
    def num_cached(self) -> int:
        return len(self._idle)

    @property
    def num_moving(self) -> int:
        return len(self._moving)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_unlisted(self) -> int:
        return len(self._unlisted)

    def list_held(self, held: Iterable[tuple[bytes, int]]) -> None:
        """The worker found these keys at these places. What was recorded since is newer, and wins."""
        for key, place in held:
            if place in self._unlisted and key not in self._idle and key not in self._moving:
                self._unlisted.remove(place)
                self._idle[key] = place

    def end_list(self, unusable: Iterable[int]) -> None:
        """The list is complete: all other places are empty, and the `unusable` ones must stay so."""
        if not self.is_listed:
            self.is_listed = True
            kept_empty = self._unlisted.intersection(unusable)
            self.num_unusable = len(kept_empty)
            self._free = sorted({*self._free, *self._unlisted} - kept_empty, reverse=True)  # some were freed already
            self._unlisted.clear()

    def has(self, key: bytes) -> bool:
        """Return whether a page is there, or on its way."""
        return key in self._idle or key in self._moving

    def is_readable(self, key: bytes) -> bool:
        """Return whether `begin_load` can be called."""
        return key in self._idle

    def touch(self, key: bytes) -> bool:
        """Mark this content as just used. Returns whether it is there, or on its way."""
        if key in self._idle:
            self._idle.move_to_end(key)
            return True
        return key in self._moving

    def begin_store(self, key: bytes) -> int:
        """Return a place for a page that is not there; -1 if there is none."""
        if self._free:
            place = self._free.pop()
        elif self._idle:
            _, place = self._idle.popitem(last=False)
        else:
            return -1
        self._moving[key] = place
        return place

    def begin_load(self, key: bytes) -> int:
        """Return the place of a page that is there, and reserve it until `end_move`."""
        place = self._moving[key] = self._idle.pop(key)
        return place

    def end_move(self, key: bytes, *, is_there: bool) -> None:
        """A page was written or read (`is_there`), or that failed and its place is empty."""
        place = self._moving.pop(key)
        if is_there:
            self._idle[key] = place
        else:
            self._free.append(place)

    def drop_cached(self) -> int:
        """Empty all places that are not moving; return how many held a page."""
        num_dropped = len(self._idle)
        self._free += self._idle.values()
        self._idle.clear()
        return num_dropped

    def places(self) -> dict[str, list[int]]:
        """Return the places in each state; for checks."""
        return {
            "free": self._free[:],
            "cached": list(self._idle.values()),
            "moving": list(self._moving.values()),
            "unlisted": sorted(self._unlisted),
        }
