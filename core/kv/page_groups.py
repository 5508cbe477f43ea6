"""Several page groups in one pool: the first keeps all positions, the others a window each.

A position can be computed once it has a page in every group, and a prefix can be reused where every group can start.
The first group's pages are taken at admission. Those of the others are taken, and released, chunk by chunk.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import partial

from penstock.core.kv.holder import Holder, PageTables
from penstock.core.kv.kv_pages import KVPages, NewPage
from penstock.core.kv.lower_tier import LowerTier
from penstock.core.kv.page_pool import CacheNode, PrefixHit, host_ref
from penstock.core.kv.snapshots import Snapshots
from penstock.core.kv.state_pages import StatePages
from penstock.core.kv.window_pages import WindowPages, WindowTable
from penstock.ipc.messages import WindowGroup


def make_pages(
    num_pages: int,
    page_size: int,
    windows: Sequence[WindowGroup],
    *,
    enable_prefix_caching: bool,
    has_states: bool = False,
    snapshots: Snapshots | None = None,
) -> KVPages:
    """Return the bookkeeping for a pool; the simpler one for a single group.

    With `has_states`, a sequence cannot start from pages alone: it also needs a snapshot.
    """
    enable_prefix_caching &= not has_states or snapshots is not None
    if windows:
        kv: KVPages = GroupedPages(num_pages, page_size, windows, enable_prefix_caching=enable_prefix_caching)
    elif snapshots is not None and enable_prefix_caching:
        kv = StatePages(num_pages, page_size, snapshots)
    else:
        kv = KVPages(num_pages, page_size, enable_prefix_caching=enable_prefix_caching)
    kv.can_fork &= not has_states
    return kv


class GroupedPages(KVPages):
    """Like `KVPages`, with one more page table per sequence for each further group."""

    __slots__ = ()

    def __init__(
        self, num_pages: int, page_size: int, windows: Sequence[WindowGroup], *, enable_prefix_caching: bool
    ) -> None:
        super().__init__(num_pages, page_size, enable_prefix_caching=enable_prefix_caching)
        self.windows = tuple(WindowPages(self.pool, group, page_size) for group in windows)
        self.can_fork = False
        if self.cache is not None:
            self.cache.given_up = self._given_up

    def use_tiers(self, tiers: LowerTier) -> None:
        self.tiers = tiers
        for number, group in enumerate(self.windows, 1):
            group.given_up = partial(tiers.demote_window_page, number)

    @property
    def num_available(self) -> int:
        return super().num_available + sum(len(group.idle) for group in self.windows)

    def reserve(self, count: int) -> bool:
        """Evict the least recently used pages, of any group."""
        if count > self.num_available:
            return False
        while self.pool.num_free < count:
            assert self.cache is not None, "only cached pages can be evicted"
            idle = [group for group in self.windows if group.idle]
            coldest = min(idle, key=WindowPages.idle_since, default=None)
            if coldest is not None and coldest.idle_since() < self.cache.coldest:
                coldest.evict()
            elif not self.cache.evict(1):
                assert coldest is not None, "fewer pages can be evicted than were counted"
                coldest.evict()
        return True

    def reserve_next(self, seq: Holder) -> bool:
        return self.reserve(self._num_lacking(seq))

    def grow(self, seq: Holder, end: int) -> tuple[list[int], list[NewPage]]:
        page_ids: list[int] = []
        others: list[NewPage] = []
        end = min(end, seq.max_computed_tokens)
        while (position := seq.launch_limit) < end and self.reserve_next(seq):
            if len(seq.page_ids) * self.page_size <= position:
                page_ids.append(self.pool.allocate_one())
                seq.page_ids.append(page_ids[-1])
                seq.page_seconds -= self.now
            for number, (group, table) in enumerate(self._tables(seq), 1):
                if table.num_pages * group.page_size <= position:
                    others.append(NewPage(number, table.num_pages, group.take(table)))
                    seq.page_seconds -= self.now
            self.limit_launch(seq)
        return page_ids, others

    def start_with(self, seq: Holder, hit: PrefixHit, num_tokens: int) -> int:
        fetched: list[tuple[int, int]] = []
        for group, refs in zip(self.windows, hit.window_page_ids or ((),) * len(self.windows), strict=True):
            table = WindowTable(group.first_needed(num_tokens), [])
            for ref in refs:
                if ref >= 0:
                    table.page_ids.append(ref)
                else:
                    fetched.append((host_ref(ref), group.take(table)))
            seq.window_tables.append(table)
        return self.tiers.promote(seq, hit, fetched) if self.tiers is not None else 0

    def limit_launch(self, seq: Holder) -> None:
        super().limit_launch(seq)
        ends = [table.num_pages * group.page_size for group, table in self._tables(seq)]
        seq.launch_limit = min(seq.launch_limit, *ends)

    def find_prefix(self, seq: Holder) -> PrefixHit:
        hit = super().find_prefix(seq)
        nodes: list[CacheNode] = []
        node = hit.node
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        pages_at = [partial(self._page_at, number, nodes, hit) for number in range(len(self.windows))]
        count, longest = -1, len(nodes) + len(hit.host_page_ids)
        while count != longest:  # shortening it for one group may rule it out for another
            count = longest
            for group, page_at in zip(self.windows, pages_at, strict=True):
                longest = group.border(page_at, longest)
        window_page_ids = tuple(
            group.pages_at(page_at, count) for group, page_at in zip(self.windows, pages_at, strict=True)
        )
        host_page_ids = hit.host_page_ids[: max(0, count - len(nodes))]
        del nodes[count:]
        return PrefixHit(nodes[-1] if nodes else None, hit.page_ids[:count], window_page_ids, host_page_ids)

    def _page_at(self, number: int, nodes: list[CacheNode], hit: PrefixHit, index: int) -> int:
        page = self.windows[number].page(nodes, index)
        return self.tiers.window_page(number + 1, nodes, hit, index) if page < 0 and self.tiers is not None else page

    def hold(self, namespace: Hashable, hit: PrefixHit) -> CacheNode | None:
        for group, refs in zip(self.windows, hit.window_page_ids, strict=True):
            group.share([ref for ref in refs if ref >= 0])
        return super().hold(namespace, hit)

    def drop(self, cursor: CacheNode | None, hit: PrefixHit) -> None:
        super().drop(cursor, hit)
        for group, refs in zip(self.windows, hit.window_page_ids, strict=True):
            group.release([ref for ref in refs if ref >= 0], self._now)

    def settle(self, seq: Holder) -> None:
        """Cache full pages, then free those that lie behind a window."""
        num_before = seq.num_tree_pages
        super().settle(seq)
        node = seq.cache_node
        for depth in range(seq.num_tree_pages - 1, num_before - 1, -1):
            assert node is not None
            for group, table in self._tables(seq):
                group.cache(node, depth, table)
            node = node.parent
        for group, table in self._tables(seq):
            num_pages = len(table.page_ids)
            group.free_behind(table, seq.num_settled_tokens, self._now)
            seq.page_seconds += self.now * (num_pages - len(table.page_ids))

    def next_settle_event(self, seq: Holder) -> int:
        """As in `KVPages`, but even without a prefix cache there is something to free when a page is full."""
        return min((seq.num_settled_tokens // self.page_size + 1) * self.page_size, seq.max_computed_tokens)

    def release(self, seq: PageTables) -> None:
        super().release(seq)
        for group, table in self._tables(seq):
            group.release(table.page_ids, self._now)

    @property
    def _now(self) -> int:
        return self.cache.clock if self.cache is not None else 0

    def _tables(self, seq: PageTables) -> Iterator[tuple[WindowPages, WindowTable]]:
        return zip(self.windows, seq.window_tables, strict=True)

    def _num_lacking(self, seq: Holder) -> int:
        """Pages that the first position without pages needs, over all groups."""
        position = seq.launch_limit
        return (len(seq.page_ids) * self.page_size <= position) + sum(
            table.num_pages * group.page_size <= position for group, table in self._tables(seq)
        )

    def _given_up(self, node: CacheNode) -> None:
        if self.tiers is not None:
            self.tiers.demote(node)
        for group in self.windows:
            group.forget(node)
