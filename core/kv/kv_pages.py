"""Page pool and prefix cache as one: what sequences take, share, settle and give back."""

from collections.abc import Hashable
from typing import NamedTuple

from penstock.core.kv.holder import Holder
from penstock.core.kv.page_pool import PagePool
from penstock.core.kv.prefix_cache import CacheNode, PrefixCache
from penstock.core.kv.window_pages import WindowPages, WindowTable


class PrefixHit(NamedTuple):
    """Cached pages for the start of a sequence, and the tree node where they end (None: no hit)."""

    node: CacheNode | None
    page_ids: list[int]
    window_page_ids: tuple[list[int], ...] = ()  # of each further group, those that the next position sees


class NewPage(NamedTuple):
    """A page of one of the further groups that a sequence got."""

    group: int  # 1, 2, ...
    place: int  # in the sequence's page table of that group
    page_id: int


class KVPages:
    """All pages of one worker group's KV pool, where all layers keep all positions: there is one page group."""

    __slots__ = ("cache", "page_size", "pool", "windows")

    def __init__(self, num_pages: int, page_size: int, *, enable_prefix_caching: bool) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, page_size) if enable_prefix_caching else None
        self.windows: tuple[WindowPages, ...] = ()  # further groups (`page_groups.py`)

    @property
    def num_available(self) -> int:
        """Pages that are free or can be made so by evicting."""
        cache = self.cache
        return self.pool.num_free + (cache.num_evictable if cache is not None else 0)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def reserve(self, count: int) -> bool:
        """Make `count` pages free, evicting cold cache leaves if needed; False if there are not that many."""
        missing = count - self.pool.num_free
        if missing <= 0:
            return True
        return self.cache is not None and missing <= self.cache.num_evictable and self.cache.evict(missing) == missing

    def reserve_next(self, seq: Holder) -> bool:
        """Make free what the first position without pages needs, as `reserve` does."""
        return self.pool.num_free > 0 or self.reserve(1)

    def drop_cached(self) -> int:
        """Free all cached pages that no sequence uses; return how many."""
        return self.cache.evict(self.cache.num_evictable) if self.cache is not None else 0

    def append_page(self, seq: Holder) -> int:
        """Give the sequence one more page (there is a free one) and return it."""
        page_id = self.pool.allocate_one()
        seq.page_ids.append(page_id)
        self.limit_launch(seq)
        return page_id

    def grow(self, seq: Holder, end: int) -> tuple[list[int], list[NewPage]]:
        """Let positions before `end` have pages in every group, or as many of them as there are pages for.

        Returns:
            New pages of the first group, which has them from the admission on; and of the others.
        """
        return [], []

    def window_tables(self, hit: PrefixHit) -> list[WindowTable]:
        """The page tables of the further groups with which a sequence begins, after a hit that is held."""
        return []

    def limit_launch(self, seq: Holder) -> None:
        seq.launch_limit = min(len(seq.page_ids) * self.page_size, seq.max_computed_tokens)

    def find_prefix(self, seq: Holder) -> PrefixHit:
        """Look up the known tokens, but those that must be computed: the last one, at least."""
        if self.cache is None:
            return PrefixHit(None, [])
        max_pages = seq.num_reusable_tokens // self.page_size
        return PrefixHit(*self.cache.match(seq.request.namespace, seq.token_ids, max_pages))

    def hold(self, namespace: Hashable, hit: PrefixHit) -> CacheNode | None:
        """Keep a hit from eviction; return the cursor to `drop` or to give to a sequence."""
        return None if self.cache is None else self.cache.acquire(namespace, hit.node)

    def drop(self, cursor: CacheNode | None, hit: PrefixHit) -> None:
        """Undo `hold`."""
        if self.cache is not None and cursor is not None:
            self.cache.release(cursor)

    def settle(self, seq: Holder) -> None:
        """Put the sequence's newly settled full pages into the prefix cache, O(1) a page."""
        node = seq.cache_node
        if node is None or self.cache is None:
            return
        page_size = self.page_size
        # The property, written out: a call less for each page that fills.
        num_settled = len(seq.token_ids) - seq.num_unsettled_tokens
        for i in range(seq.num_tree_pages, num_settled // page_size):
            tokens = seq.token_ids[i * page_size : (i + 1) * page_size].tobytes()
            node = self.cache.extend(node, tokens, seq.page_ids[i])
            seq.num_tree_pages = i + 1
        seq.cache_node = node

    def next_settle_event(self, seq: Holder) -> int:
        """Return the count of settled tokens at which the sequence has a page to cache or its full length."""
        if self.cache is None:
            return seq.max_computed_tokens
        next_page, last = (seq.num_tree_pages + 1) * self.page_size, seq.max_computed_tokens
        return next_page if next_page < last else last

    def release(self, seq: Holder) -> None:
        """Take the sequence's pages back; those in the prefix cache stay there until they are evicted."""
        if self.cache is not None and seq.cache_node is not None:
            self.cache.release(seq.cache_node)
        self.pool.release(seq.page_ids)
