"""Pages of layers that see only a window of the last positions: taken as needed, and freed behind the window.

    pages of 4, a window of 6, 18 tokens settled

    positions    0    4    8    12   16   20
    table                       [ c )[ d )[ e )      position 18 sees 13 to 18: what is before page c is behind
    tree         [ a )...[ b )[ c )[ d )             a was unused first and is evicted; b may be evicted at any time

All groups take their pages from one pool. A page is freed once it lies behind the window of every position that may
still be computed: that is, from the first unsettled position on, so that steps in flight keep their pages. As in the
first group, the prefix cache owns full pages here. But it may give up any page that no sequence holds, wherever its
node is: a prefix can be reused up to each border before which a whole window remains.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from penstock.core.kv.page_pool import MISSING, CacheNode, PagePool
from penstock.ipc.messages import WindowGroup


class WindowTable:
    """A sequence's pages of one group: pages `first`, `first + 1`, ... of its positions."""

    __slots__ = ("first", "page_ids")

    def __init__(self, first: int, page_ids: list[int]) -> None:
        self.first = first
        self.page_ids = page_ids

    @property
    def num_pages(self) -> int:
        """Number of pages, including freed ones."""
        return self.first + len(self.page_ids)


class WindowPages:
    """One group's pages: which of them the prefix cache owns, and which of those are unused."""

    __slots__ = ("_homes", "_node_size", "_of_node", "_pool", "given_up", "idle", "page_size", "window")

    def __init__(self, pool: PagePool, group: WindowGroup, node_size: int) -> None:
        """`node_size`: tokens of a node of the prefix cache. Sizes are powers of two."""
        self._pool = pool
        self._node_size = node_size
        self.page_size = group.page_size
        self.window = group.window
        self._homes: dict[int, tuple[CacheNode, int]] = {}  # cached page -> its node, and its index in a page table
        self._of_node: dict[CacheNode, dict[int, int]] = {}  # the reverse
        self.idle: OrderedDict[int, int] = OrderedDict()  # cached pages in no table -> since when, oldest first
        self.given_up: Callable[[CacheNode, int, int], None] | None = None
        """Called with the node, index and id of each evicted page, so that a lower tier can take over its content."""

    def first_needed(self, position: int) -> int:
        """Index of the first page that this position sees."""
        return max(0, position - self.window + 1) // self.page_size

    def take(self, table: WindowTable) -> int:
        """Give a table one more page; there must be a free one."""
        page_id = self._pool.allocate_one()
        table.page_ids.append(page_id)
        return page_id

    def share(self, page_ids: Iterable[int]) -> None:
        """Count another table that holds these cached pages."""
        for page_id in page_ids:
            self.idle.pop(page_id, None)
        self._pool.share(page_ids)

    def release(self, page_ids: Iterable[int], now: int) -> None:
        """Remove one table from the count; a cached page in no other table is idle from `now` on."""
        self._pool.release(page_ids)
        for page_id in page_ids:
            if page_id in self._homes and not self._pool.num_users(page_id):
                self.idle[page_id] = now

    def free_behind(self, table: WindowTable, num_settled: int, now: int) -> None:
        """Release the pages that no position from `num_settled` on sees."""
        count = self.first_needed(num_settled) - table.first
        if count > 0:
            self.release(table.page_ids[:count], now)
            del table.page_ids[:count]
            table.first += count

    # --- the prefix cache --------------------------------------------------------------------

    def cache(self, node: CacheNode, depth: int, table: WindowTable) -> None:
        """Let the node at depth 0, 1, ... own the pages that are full at its end, unless it has them already."""
        size = self._node_size
        for index in range(depth * size // self.page_size, (depth + 1) * size // self.page_size):
            homes = self._of_node.setdefault(node, {})
            if index >= table.first and index not in homes:
                page_id = table.page_ids[index - table.first]
                homes[index] = page_id
                self._homes[page_id] = node, index
                self._pool.cache(page_id)

    def border(self, page_at: Callable[[int], int], count: int) -> int:
        """The largest number of nodes, up to `count`, of a path that end with a whole window of cached pages.

        `page_at` returns the page with an index, or MISSING.
        """
        while count:
            end = count * self._node_size
            index, rest = divmod(end, self.page_size)
            if rest:
                count -= 1
                continue
            first = self.first_needed(end)
            while index > first and page_at(index - 1) != MISSING:
                index -= 1
            if index == first:
                return count
            count = (index - 1) * self.page_size // self._node_size  # no border inside or after a missing page
        return 0

    def pages_at(self, page_at: Callable[[int], int], count: int) -> list[int]:
        """Return the pages that the position after `count` nodes sees; `border` has found them all."""
        end = count * self._node_size
        return [page_at(index) for index in range(self.first_needed(end), end // self.page_size)]

    def depth_of(self, index: int) -> int:
        """Return the depth of the node that a page belongs to: 0 for the first node after the root."""
        return ((index + 1) * self.page_size - 1) // self._node_size

    def page(self, nodes: Sequence[CacheNode], index: int) -> int:
        """Return the cached page with an index, on a path of nodes; MISSING if there is none."""
        depth = self.depth_of(index)
        return self.page_of(nodes[depth], index) if depth < len(nodes) else MISSING

    def page_of(self, node: CacheNode, index: int) -> int:
        """Like `page`, given the node that the page belongs to."""
        return self._of_node.get(node, {}).get(index, MISSING)

    def has(self, page_id: int) -> bool:
        """Whether the prefix cache owns a page for this group."""
        return page_id in self._homes

    def idle_since(self) -> int:
        """When the page that `evict` would free became idle; there must be one."""
        return next(iter(self.idle.values()))

    def evict(self) -> None:
        """Free the page that has been idle for longest; there must be one."""
        page_id, _ = self.idle.popitem(last=False)
        node, index = self._homes.pop(page_id)
        if self.given_up is not None:
            self.given_up(node, index, page_id)
        homes = self._of_node[node]
        del homes[index]
        if not homes:
            del self._of_node[node]
        self._pool.uncache(page_id)

    def forget(self, node: CacheNode) -> None:
        """The prefix cache gives up an unused node: free its pages."""
        for index, page_id in self._of_node.pop(node, {}).items():
            if self.given_up is not None:
                self.given_up(node, index, page_id)
            del self._homes[page_id]
            del self.idle[page_id]
            self._pool.uncache(page_id)

    def cached(self) -> list[tuple[CacheNode, int, int]]:
        """Return the node, index and id of every cached page; for checks."""
        return [(node, index, page_id) for page_id, (node, index) in self._homes.items()]
