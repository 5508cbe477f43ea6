"""The scheduler's bookkeeping of pages in the host's memory: free, cached by content, or held.

    free     ◀──▶ cached   has a key and no holder: found by its key; the least recently used goes first
                    ▲▼
                  held     by sequences that are swapped out, by copies being planned, or while a lower tier moves it

A page is taken for a holder, and gets a key if others may find it. When its last holder lets go, it is cached if it has
a key, else free. The worker knows nothing of this: it copies pages as plans say. Because it does so in the order of the
plans, a page can be reused in the same step in which it is copied away.
"""

from collections import OrderedDict
from collections.abc import Callable


class HostTier:
    """Free list, keys and holders of `num_pages` pages; every operation is O(1)."""

    __slots__ = ("_free", "_idle", "_keys", "_num_holders", "_pages", "changed", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages: dict[bytes, int] = {}  # by key
        self._keys = [b""] * num_pages
        self._num_holders = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, least recently used first
        self.changed: Callable[[bytes, bool], None] | None = None
        """Called with each key that can be found from now on (True), or no longer."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that have a key and no holder."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free) - len(self._idle)

    @property
    def has_keys(self) -> bool:
        """Whether there is anything to find."""
        return bool(self._pages)

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._idle)

    def find(self, key: bytes) -> int:
        """Return the page with this content, or -1. The next `take` may reuse it: hold it first."""
        return self._pages.get(key, -1)

    def take(self) -> int:
        """Return a page for one holder, without a key; -1 if all are held."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget_key(page)
        else:
            return -1
        self._num_holders[page] = 1
        return page

    def name(self, page: int, key: bytes) -> None:
        """Let a held page be found by its content; no effect if another page has that key already."""
        if key not in self._pages:
            self._pages[key] = page
            self._keys[page] = key
            if self.changed is not None:
                self.changed(key, True)

    def hold(self, page: int) -> None:
        """Count one more holder of a page that is cached or held."""
        self._idle.pop(page, None)
        self._num_holders[page] += 1

    def release(self, page: int) -> None:
        """Count one holder less; without holders a page is cached, as the most recently used one, or free."""
        self._num_holders[page] -= 1
        if not self._num_holders[page]:
            if self._keys[page]:
                self._idle[page] = None
            else:
                self._free.append(page)

    def touch(self, page: int) -> None:
        """Mark a page as just used."""
        if page in self._idle:
            self._idle.move_to_end(page)

    def forget(self, page: int) -> None:
        """Remove a page's key: its content is not what the key says, or is not wanted."""
        if self._keys[page]:
            self._forget_key(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def drop_cached(self) -> int:
        """Free all cached pages; return how many."""
        pages = list(self._idle)
        for page in pages:
            self.forget(page)
        return len(pages)

    def is_held(self, page: int) -> bool:
        """Whether a page has a holder."""
        return self._num_holders[page] > 0

    def key_of(self, page: int) -> bytes:
        """Return a page's key; empty if it has none."""
        return self._keys[page]

    def holder_counts(self) -> list[int]:
        """Return the number of holders of each page; for checks."""
        return self._num_holders[:]

    def free_pages(self) -> list[int]:
        """Return the free pages; for checks."""
        return self._free[:]

    def cached_pages(self) -> list[int]:
        """Return the cached pages, least recently used first; for checks."""
        return list(self._idle)

    def keys(self) -> dict[bytes, int]:
        """Return all pages by key; for checks."""
        return dict(self._pages)

    def _forget_key(self, page: int) -> None:
        key, self._keys[page] = self._keys[page], b""
        del self._pages[key]
        if self.changed is not None:
            self.changed(key, False)
