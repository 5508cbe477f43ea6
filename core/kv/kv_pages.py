"""Page pool and prefix cache together: where sequences start, and which pages they take, share, settle and release.

A fork. P prompt tokens; the sibling S has settled at least positions [0, P), F is the newcomer:

    positions    0 .................. f*page_size ......... P-1 ......... S's own outputs
    S's pages    [ page 0 ) ... [ page f-1 ) [ page f                    ) ...
    F's pages    [ the same pages, shared  ) [ page f', a copy of page f  )
    F computes                                             [P-1)

  - Pages [0, f), f = (P-1) // page_size, lie entirely below position P-1. They are never written again
    (S writes at P and above, F at P-1 and above), so both page tables contain them, counted twice.
  - Page f, if it begins below P-1, holds prompt positions that F needs and others that S still
    writes. F gets its own page, and the plan that admits F copies f to f' before its forward pass.
    F itself overwrites what the copy contains beyond P-2 before F reads it.
  - The plans that wrote [0, P-1) were executed before: they are settled. S cannot lose page f before
    the copy: it is released after this plan was made at the earliest, and the worker executes
    plans in order, so the page's next owner writes it after the copy.
  - F computes position P-1 itself, because that gives the logits for its own first token.

Sharing waits for *settled*, not only launched, positions: then every shared page is in the prefix
cache's tree (where there is one), F's cursor holds it there, and the count of evictable pages stays exact.

If some layers see only a window, the sibling has freed the pages behind it. If some keep a state of each row, the
sibling's state has moved on. In both cases a sequence does not fork: it starts at the longest hit once the sibling has
settled the prompt.
"""

from collections.abc import Hashable
from typing import NamedTuple

from penstock.core.kv.holder import Holder, PageTables, Siblings
from penstock.core.kv.lower_tier import LowerTier
from penstock.core.kv.page_copies import PageCopies
from penstock.core.kv.page_pool import CacheNode, PagePool, PrefixCache, PrefixHit
from penstock.core.kv.snapshots import Snapshots
from penstock.core.kv.window_pages import WindowPages


class NewPage(NamedTuple):
    """A page of one of the further groups that a sequence got."""

    group: int  # 1, 2, ...
    place: int  # index in the sequence's page table of that group
    page_id: int


class KVPages:
    """All pages of one worker group's KV pool, where all layers keep all positions: there is one page group."""

    __slots__ = ("cache", "can_fork", "copies", "now", "page_size", "pool", "snapshots", "tiers", "windows")

    def __init__(self, num_pages: int, page_size: int, *, enable_prefix_caching: bool) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, page_size) if enable_prefix_caching else None
        self.windows: tuple[WindowPages, ...] = ()  # further groups (`page_groups.py`)
        self.now = 0.0  # seconds, for page-time accounting
        self.copies = PageCopies()  # of the next plan
        self.tiers: LowerTier | None = None  # below the device
        self.can_fork = True  # whether a sequence can start from a sibling's pages
        self.snapshots: Snapshots | None = None  # of states, if some layers keep them (`state_pages.py`)

    def use_tiers(self, tiers: LowerTier) -> None:
        """Let evicted pages go to a lower tier, and be found there."""
        self.tiers = tiers
        if self.cache is not None:
            self.cache.given_up = tiers.demote

    @property
    def num_available(self) -> int:
        """Pages that are free, or can be freed by eviction."""
        cache = self.cache
        return self.pool.num_free + (cache.num_evictable if cache is not None else 0)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def reserve(self, count: int) -> bool:
        """Make `count` pages free, evicting cold cache leaves if needed; False if there are not enough."""
        missing = count - self.pool.num_free
        if missing <= 0:
            return True
        return self.cache is not None and missing <= self.cache.num_evictable and self.cache.evict(missing) == missing

    def reserve_next(self, seq: Holder) -> bool:
        """Like `reserve`, for the pages that the first position without pages needs."""
        return self.pool.num_free > 0 or self.reserve(1)

    def drop_cached(self) -> int:
        """Free all cached pages that no sequence uses, in all tiers; return how many of the device."""
        if self.tiers is not None:
            self.tiers.drop_cached(is_dropping=True)
        num_free = self.pool.num_free
        self.reserve(self.num_available)
        if self.tiers is not None:
            self.tiers.drop_cached(is_dropping=False)
        return self.pool.num_free - num_free

    def append_page(self, seq: Holder) -> int:
        """Give the sequence one more page (there is a free one) and return it."""
        page_id = self.pool.allocate_one()
        page_ids = seq.page_ids
        page_ids.append(page_id)
        seq.page_seconds -= self.now
        # `limit_launch`, inlined: this runs many times per step.
        end, last = len(page_ids) * self.page_size, seq.max_computed_tokens
        seq.launch_limit = end if end < last else last
        return page_id

    def grow(self, seq: Holder, end: int) -> tuple[list[int], list[NewPage]]:
        """Give positions before `end` pages in every group, as far as there are pages.

        Returns:
            New pages of the first group, whose pages otherwise come at admission; and of the other groups.
        """
        return [], []

    def start_with(self, seq: Holder, hit: PrefixHit, num_tokens: int) -> int:
        """Give a sequence with pages of the first group the other pages it starts with after a hit that is held.

        Returns:
            How many pages are copied from a lower tier.
        """
        return self.tiers.promote(seq, hit, ()) if self.tiers is not None else 0

    def limit_launch(self, seq: Holder) -> None:
        seq.launch_limit = min(len(seq.page_ids) * self.page_size, seq.max_computed_tokens)

    def find_prefix(self, seq: Holder) -> PrefixHit:
        """Look up the known tokens, except those that must be computed (at least the last one)."""
        if self.cache is None:
            return PrefixHit(None, [])
        max_pages = seq.num_reusable_tokens // self.page_size
        request = seq.request
        hit = PrefixHit(*self.cache.match(request.namespace, seq.token_ids, max_pages, request.marks))
        return hit if self.tiers is None else self.tiers.continued(seq, hit, max_pages)

    def hold(self, namespace: Hashable, hit: PrefixHit) -> CacheNode | None:
        """Protect a hit from eviction; return the cursor to `drop` or to give to a sequence."""
        if self.tiers is not None:
            self.tiers.hold(hit)
        return None if self.cache is None else self.cache.acquire(namespace, hit.node)

    def drop(self, cursor: CacheNode | None, hit: PrefixHit) -> None:
        """Undo `hold`."""
        if self.tiers is not None:
            self.tiers.let_go(hit)
        if self.cache is not None and cursor is not None:
            self.cache.release(cursor)

    def settle(self, seq: Holder) -> None:
        """Put the sequence's newly settled full pages into the prefix cache, O(1) per page."""
        node = seq.cache_node
        if node is None or self.cache is None:
            return
        page_size, marks = self.page_size, seq.request.marks
        # The property, inlined: saves a call per full page.
        num_settled = len(seq.token_ids) - seq.num_unsettled_tokens
        for i in range(seq.num_tree_pages, num_settled // page_size):
            tokens = seq.token_ids[i * page_size : (i + 1) * page_size].tobytes()
            if marks is not None:
                tokens += marks.get(i, b"")
            node = self.cache.extend(node, tokens, seq.page_ids[i])
            seq.num_tree_pages = i + 1
        seq.cache_node = node

    def next_settle_event(self, seq: Holder) -> int:
        """Return the count of settled tokens at which the sequence has a page to cache or its full length."""
        if self.cache is None:
            return seq.max_computed_tokens
        next_page, last = (seq.num_tree_pages + 1) * self.page_size, seq.max_computed_tokens
        return next_page if next_page < last else last

    def release(self, seq: PageTables) -> None:
        """Release the sequence's pages; those in the prefix cache stay there until they are evicted."""
        if self.cache is not None and seq.cache_node is not None:
            self.cache.release(seq.cache_node)
        self.pool.release(seq.page_ids)


class Start(NamedTuple):
    """The part that a sequence need not compute, and where it comes from."""

    num_tokens: int
    page_ids: list[int]  # shared pages, in order; the hit's host pages follow them
    copy_src: int  # page to copy into the next page of the sequence, or -1
    hit: PrefixHit  # the path to hold in the prefix cache
    is_fork: bool


def find_start(seq: Holder, kv: KVPages) -> Start | None:
    """Choose the start that leaves the least to compute; None if a sibling's prompt is worth waiting for.

    Nothing is taken or protected: the caller does that before the next change to the pages.
    """
    if kv.tiers is not None and (found := kv.tiers.returning(seq, kv.cache)) is not None:
        return Start(found[0], found[1].page_ids, -1, found[1], is_fork=False)
    hit = kv.find_prefix(seq)
    page_size = kv.page_size
    num_hit_pages = len(hit.page_ids) + len(hit.host_page_ids)
    num_hit_tokens = num_hit_pages * page_size
    # A sibling's prompt saves computing all positions but one. That is no use if their logits are needed.
    can_follow = kv.can_fork or kv.cache is not None
    siblings = seq.request.running if can_follow and not seq.owes_prompt_logprobs else ()
    last = seq.request.num_prompt_tokens - 1
    num_full_pages = last // page_size
    if siblings and num_hit_tokens < last:
        settled = [sibling for sibling in siblings if sibling.num_settled_tokens > last]
        if settled and kv.can_fork:
            sibling = settled[0]
            pages = hit.page_ids if kv.cache is not None else sibling.page_ids[:num_full_pages]
            copy_src = sibling.page_ids[num_full_pages] if last % page_size else -1
            return Start(last, pages, copy_src, hit._replace(host_page_ids=()), is_fork=True)
        # A sibling that ends with its first token leaves only what it put into the prefix cache.
        if not settled and (num_hit_pages < num_full_pages if kv.cache is not None else seq.request.can_fork):
            return None
    return Start(num_hit_tokens, hit.page_ids, -1, hit, is_fork=False)


def is_sibling_ready(request: Siblings) -> bool:
    """Return whether a parked request need not wait any longer."""
    siblings = request.running
    return not siblings or any(sibling.num_settled_tokens >= request.num_prompt_tokens for sibling in siblings)
