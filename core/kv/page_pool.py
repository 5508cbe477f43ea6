"""The scheduler's count of KV pages: which are free, and how many owners each other one has."""

from collections.abc import Iterable


class OutOfPagesError(RuntimeError):
    """More pages were taken than are free: the caller did not look first."""


class PagePool:
    """Free list and owners of `num_pages` pages, of whatever groups; every operation is O(1) per page.

    A page has two kinds of owners: the sequences whose page tables it is in (counted), and at most
    one node of the prefix cache (a flag). It is free when it has neither. So that the three numbers
    of the statistics need no search:

        num_free + num_cached (prefix cache alone) + num_used (some page table) == num_pages
    """

    __slots__ = ("_free", "_is_cached", "_num_users", "num_pages", "num_used")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_used = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_users = [0] * num_pages
        self._is_cached = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that the prefix cache alone owns."""
        return self.num_pages - len(self._free) - self.num_used

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages for one page table.

        Raises:
            OutOfPagesError: fewer are free; nothing was taken.
        """
        free = self._free
        if count > len(free):
            raise OutOfPagesError(f"{count} pages wanted, {len(free)} free")
        num_users = self._num_users
        pages = [free.pop() for _ in range(count)]
        for page_id in pages:
            num_users[page_id] = 1
        self.num_used += count
        return pages

    def allocate_one(self) -> int:
        """Take a free page for one page table; there must be one."""
        page_id = self._free.pop()
        self._num_users[page_id] = 1
        self.num_used += 1
        return page_id

    def share(self, page_ids: Iterable[int]) -> None:
        """Count one more page table that holds these pages (of another table, or of the cache)."""
        num_users = self._num_users
        for page_id in page_ids:
            if not num_users[page_id]:
                self.num_used += 1
            num_users[page_id] += 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Count one page table less; a page without any owner is free at once.

        Free at once is safe although steps in flight may still read or write the page: the worker
        executes plans strictly in the order they were made, and whoever gets the page now writes it
        in a plan that is made later. So the old owner's accesses all come before the new owner's.
        A copy that runs beside the steps, on a stream of its own, breaks this: its source would have to
        keep an owner until a result says that the copy is done.
        """
        num_users = self._num_users
        for page_id in page_ids:
            users = num_users[page_id] - 1
            num_users[page_id] = users
            if not users:
                self.num_used -= 1
                if not self._is_cached[page_id]:
                    self._free.append(page_id)

    def cache(self, page_id: int) -> None:
        """A node of the prefix cache now owns this page too (it is in some page table)."""
        self._is_cached[page_id] = 1

    def uncache(self, page_id: int) -> None:
        """The prefix cache gives this page up."""
        self._is_cached[page_id] = 0
        if not self._num_users[page_id]:
            self._free.append(page_id)

    def num_users(self, page_id: int) -> int:
        """Page tables that a page is in."""
        return self._num_users[page_id]

    def user_counts(self) -> list[int]:
        """Return for each page how many page tables it is in; for checks."""
        return self._num_users[:]

    def cached_flags(self) -> list[int]:
        """Return for each page 1 if a node of the prefix cache owns it; for checks."""
        return list(self._is_cached)

    def free_page_ids(self) -> list[int]:
        """Return the free pages; for checks."""
        return self._free[:]
