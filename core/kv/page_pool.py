"""KV pages and their owners: page tables, which the pool counts, and the prefix cache.

The prefix cache is a radix tree over page-sized runs of tokens whose nodes own pages:

    root("") ──[t0 t1 t2 t3]──▶ page 7 ──[t4 t5 t6 t7]──▶ page 2      cursor of sequence A
                                      └──[t4 t5 t9 t9]──▶ page 5      no cursor: evictable
    root("salt") ──[t0 t1 t2 t3]──▶ page 9                            never shared with the root above

An edge is the tokens of one page (as bytes in a dict, with the marks of images), so a hit compares the tokens
themselves; the dict's hash only finds the candidate. Each running sequence has a cursor: the node up to which its own
pages are in the tree. A node is in use if a cursor is at it, or one of its children is in use. So all nodes below an
unused node are unused, too: all unused nodes can be evicted, leaves first, and their number is exact. (Like the locked
root paths of SGLang's RadixCache, but the walk up stops where the path is in use already.)
"""

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class OutOfPagesError(RuntimeError):
    """More pages were requested than are free: the caller did not check first."""


class PagePool:
    """Free list and owners of `num_pages` pages of all groups; every operation is O(1) per page.

    A page has two kinds of owners: the sequences whose page tables contain it (counted), and at most
    one node of the prefix cache (a flag). It is free when it has neither. So the three numbers of the
    statistics need no search:

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
        """Pages owned only by the prefix cache."""
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
        """Count another page table for these pages (which are in a table, or in the cache, already)."""
        num_users = self._num_users
        for page_id in page_ids:
            if not num_users[page_id]:
                self.num_used += 1
            num_users[page_id] += 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Remove one page table from the count; a page without any owner is free at once.

        Free at once is safe although steps in flight may still read or write the page: the worker
        executes plans strictly in the order they were made, and the page's next owner writes it
        in a plan that is made later. So the old owner's accesses all come before the new owner's.
        Copies to the host and back belong to a plan, and count as done in its order, too, even if they
        run beside the steps (`gpu_worker/state/transfers.py`).
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
        """Number of page tables that contain a page."""
        return self._num_users[page_id]

    def is_cached(self, page_id: int) -> bool:
        """Whether a node of the prefix cache owns a page."""
        return self._is_cached[page_id] == 1

    def user_counts(self) -> list[int]:
        """Return for each page how many page tables it is in; for checks."""
        return self._num_users[:]

    def cached_flags(self) -> list[int]:
        """Return for each page 1 if a node of the prefix cache owns it; for checks."""
        return list(self._is_cached)

    def free_page_ids(self) -> list[int]:
        """Return the free pages; for checks."""
        return self._free[:]


class CacheNode:
    """One page-sized run of tokens after its parent's. A root has no parent and no page."""

    __slots__ = (
        "children",
        "content_key",
        "is_queued",
        "key",
        "num_hits",
        "num_users",
        "page_id",
        "parent",
        "released_at",
        "serial",
    )

    def __init__(self, parent: "CacheNode | None", key: Hashable, page_id: int, serial: int) -> None:
        self.parent = parent
        self.key = key  # bytes of int32[page_size], and marks of images; of a root: its namespace
        self.page_id = page_id
        self.children: dict[bytes, CacheNode] = {}
        self.num_users = 0  # cursors at this node + children in use
        self.num_hits = 0  # how often a hit has ended here
        self.released_at = 0  # the cache's counter when it was last in use
        self.serial = serial  # breaks ties in the eviction heap
        self.is_queued = False  # its (only) entry is in the eviction heap
        self.content_key = b""  # computed on demand (`content_keys.py`)


MISSING = -1


def host_ref(host_page: int) -> int:
    """Map a host page to a number that is neither a device page nor MISSING; the mapping is its own inverse."""
    return -2 - host_page


class PrefixHit(NamedTuple):
    """Pages for the start of a sequence, and the tree node where the device's pages end (None: no hit)."""

    node: CacheNode | None
    page_ids: list[int]
    window_page_ids: tuple[list[int], ...] = ()
    """For each further group, the pages that the next position sees; host pages as `host_ref`."""
    host_page_ids: Sequence[int] = ()  # on the host, following `page_ids`
    num_lacking: int = 0  # pages that follow but cannot be reused: they have no snapshot
    lacks_evicted: bool = False  # one of these had a snapshot

    @property
    def num_pages(self) -> int:
        """Pages of the first group, on the device or the host."""
        return len(self.page_ids) + len(self.host_page_ids)

    @property
    def all_host_pages(self) -> list[int]:
        """The host pages of all groups, the last ones first."""
        refs = [host_ref(ref) for refs in self.window_page_ids for ref in refs if ref < 0]
        return [*refs, *reversed(self.host_page_ids)]


class PrefixCache:
    """Finds and keeps the pages of settled prefixes. One tree per namespace (salt, adapter)."""

    __slots__ = (
        "_heap", "_page_bytes", "_pool", "_roots", "clock", "extended", "given_up", "num_evictable", "num_nodes",
    )  # fmt: skip

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_bytes = page_size * 4
        self._roots: dict[Hashable, CacheNode] = {}
        self._heap: list[tuple[int, int, CacheNode]] = []
        self.clock = 0  # advances with every node that is created or released
        self.num_nodes = 0
        self.given_up: Callable[[CacheNode], None] | None = None
        """Called with each node that is evicted, while it still has its page and parents: for dropping its other data,
        and for a lower tier to take over its content."""
        self.extended: Callable[[CacheNode], None] | None = None
        """Called with each new node."""
        self.num_evictable = 0  # nodes not in use = pages that `evict` can free

    def match(
        self,
        namespace: Hashable,
        token_ids: "array[int]",
        max_pages: int,
        marks: Mapping[int, bytes] | None = None,
    ) -> tuple[CacheNode | None, list[int]]:
        """Find the longest cached prefix, at most `max_pages` long. `marks`: of its images, by page.

        Returns:
            The deepest node (None for no hit) and the page ids from the root to it. This protects nothing
            from eviction: `acquire` the node before anything else happens.
        """
        root = self._roots.get(namespace)
        if root is None or not max_pages:
            return None, []
        width = self._page_bytes
        data = token_ids[: max_pages * width // 4].tobytes()
        node = root
        pages: list[int] = []
        for offset in range(0, max_pages * width, width):
            content = data[offset : offset + width]
            if marks is not None:
                content += marks.get(offset // width, b"")
            child = node.children.get(content)
            if child is None:
                break
            node = child
            pages.append(node.page_id)
        return (node, pages) if pages else (None, [])

    def acquire(self, namespace: Hashable, node: CacheNode | None) -> CacheNode:
        """Put a cursor at the node (None: at the namespace's root); its path is then in use."""
        if node is None:
            node = self._roots.get(namespace)
            if node is None:
                node = self._roots[namespace] = self._new_node(None, namespace, -1)
        else:
            node.num_hits += 1
        self._use(node)
        return node

    def release(self, node: CacheNode) -> None:
        """Remove a cursor; nodes no longer used become evictable, as the most recently used ones."""
        self.clock += 1
        walk: CacheNode | None = node
        while walk is not None:
            walk.num_users -= 1
            if walk.num_users:
                return
            parent = walk.parent
            if parent is None:
                self._drop_empty_root(walk)
                return
            self.num_evictable += 1
            walk.released_at = self.clock
            if not walk.children:
                self._queue(walk)
            walk = parent

    def extend(self, node: CacheNode, tokens: bytes, page_id: int) -> CacheNode:
        """Move a cursor from `node` to its child for `tokens` (int32[page_size], and marks of images), O(1).

        If the child is new, it takes ownership of `page_id`. If it exists already (the same
        content was computed twice), it keeps its own page and the caller keeps `page_id`.
        """
        child = node.children.get(tokens)
        if child is None:
            self.clock += 1  # `_new_node`, inlined: this runs many times per step
            child = node.children[tokens] = CacheNode(node, tokens, page_id, self.clock)
            child.num_users = 1
            self.num_nodes += 1
            self._pool.cache(page_id)
            if self.extended is not None:
                self.extended(child)
            return child  # node loses the cursor and gains a child in use: its count stays
        self._use(child)
        node.num_users -= 1
        return child

    def evict(self, count: int) -> int:
        """Free the pages of up to `count` least recently used leaves; return how many were freed."""
        heap = self._heap
        num_freed = 0
        while num_freed < count and heap:
            released_at, _, node = heappop(heap)
            node.is_queued = False
            if node.num_users or node.children:
                continue  # queued again when it becomes an unused leaf again
            if node.released_at != released_at:
                self._queue(node)  # used since it was queued
                continue
            parent = node.parent
            assert parent is not None
            assert isinstance(node.key, bytes)
            del parent.children[node.key]
            if self.given_up is not None:
                self.given_up(node)
            self._pool.uncache(node.page_id)
            self.num_nodes -= 1
            self.num_evictable -= 1
            num_freed += 1
            if parent.parent is None:
                self._drop_empty_root(parent)
            elif not parent.children and not parent.num_users:
                self._queue(parent)
        return num_freed

    @property
    def coldest(self) -> int:
        """The clock at the last use of the node that `evict` would take first, or a bound below; the clock if none."""
        return self._heap[0][0] if self._heap else self.clock + 1

    def roots(self) -> list[CacheNode]:
        """Return the roots of all namespaces."""
        return list(self._roots.values())

    def nodes(self) -> Iterator[CacheNode]:
        """Yield every node, roots included, parents first; for checks."""
        stack = self.roots()
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    @property
    def heap_size(self) -> int:
        return len(self._heap)

    def _new_node(self, parent: CacheNode | None, key: Hashable, page_id: int) -> CacheNode:
        self.clock += 1
        return CacheNode(parent, key, page_id, self.clock)

    def _use(self, node: CacheNode) -> None:
        walk: CacheNode | None = node
        while walk is not None:
            walk.num_users += 1
            if walk.num_users > 1 or walk.parent is None:
                return
            self.num_evictable -= 1
            walk = walk.parent

    def _queue(self, node: CacheNode) -> None:
        # At most one entry per node, so the heap never outgrows the tree, however often a leaf is reused.
        if not node.is_queued:
            node.is_queued = True
            heappush(self._heap, (node.released_at, node.serial, node))

    def _drop_empty_root(self, root: CacheNode) -> None:
        # Salts are strings from clients: an empty namespace must not stay.
        if not root.children and not root.num_users:
            del self._roots[root.key]
