"""Moves whole pages between the device and the host, where they are found again by their content.

    evicted     a page that the prefix cache gives up is copied to the host, if a page is available there
    found       a hit in the prefix cache continues with host pages; they are copied into pages of the sequence,
                which the prefix cache then owns as if they had been computed
    swapped     a preempted sequence's settled pages, the partial last one too, are held on the host until it returns

Copies count as done in the order in which they are requested here, before the next plan's forward pass. So a page, on
the device or the host, may be reused as soon as its copy is requested. Only settled positions are ever copied: they no
longer change, and no result is awaited for them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.core.kv.content_keys import node_key, page_content, window_key
from penstock.core.kv.holder import Holder
from penstock.core.kv.host_tier import HostTier
from penstock.core.kv.lower_tier import Swapped
from penstock.core.kv.page_copies import PageCopies
from penstock.core.kv.page_pool import MISSING, CacheNode, PrefixCache, PrefixHit, host_ref
from penstock.core.kv.window_pages import WindowPages
from penstock.ipc.page_keys import page_key, root_key


@dataclass(slots=True)
class TierTotals:
    """Totals since the scheduler's start; they survive workers and only grow."""

    num_demoted_pages: int = 0  # copied to the host when they were evicted
    num_lost_pages: int = 0  # evicted while all pages of the host were held
    num_promoted_pages: int = 0  # copied back for a hit
    num_swapped_out: int = 0  # sequences
    num_swapped_in: int = 0
    num_pages_to_host: int = 0  # all copies
    num_pages_from_host: int = 0
    num_copy_us: int = 0  # the worker's time for them


class Tiers:
    """One worker's host tier, and the preempted sequences that it holds."""

    __slots__ = ("_copies", "_is_dropping", "_page_size", "_windows", "host", "swapped", "totals")

    def __init__(
        self, host: HostTier, copies: PageCopies, totals: TierTotals, page_size: int, windows: Sequence[WindowPages]
    ) -> None:
        """`windows`: the further page groups of the same pool."""
        self.host = host
        self.totals = totals
        self.swapped: dict[Holder, Swapped] = {}  # preempted sequences
        self._copies = copies
        self._page_size = page_size
        self._windows = windows
        self._is_dropping = False

    # --- evicted ----------------------------------------------------------------------------

    def demote(self, node: CacheNode) -> None:
        """The prefix cache gives up this node, which still has its page and its parents."""
        if not self._is_dropping:
            self._demote(node.page_id, node_key(node))

    def demote_window_page(self, group: int, node: CacheNode, index: int, page_id: int) -> None:
        """A further page group (1, 2, ...) gives up a page of this node."""
        if not self._is_dropping:
            self._demote(page_id, window_key(node_key(node), group, index))

    def drop_cached(self, *, is_dropping: bool) -> None:
        """Drop what is cached here, and stop demoting evicted pages until called with `is_dropping=False`."""
        self._is_dropping = is_dropping
        self.host.drop_cached()

    def _demote(self, page_id: int, key: bytes) -> None:
        host = self.host
        found = host.find(key)
        if found >= 0:
            host.touch(found)
            return
        page = host.take()
        if page < 0:
            self.totals.num_lost_pages += 1
            return
        self._to_host(page_id, page)
        host.name(page, key)
        host.release(page)
        self.totals.num_demoted_pages += 1

    # --- found ------------------------------------------------------------------------------

    def continued(self, seq: Holder, hit: PrefixHit, max_pages: int) -> PrefixHit:
        """Return a hit extended by the host pages of the first group that follow the device's pages."""
        host, size = self.host, self._page_size
        if not host.has_keys:
            return hit
        key = root_key(seq.request.namespace) if hit.node is None else node_key(hit.node)
        found: list[int] = []
        for i in range(len(hit.page_ids), max_pages):
            key = page_key(key, page_content(seq, i, size))
            page = host.find(key)
            if page < 0:
                break
            found.append(page)
        return hit._replace(host_page_ids=found) if found else hit

    def window_page(self, group: int, nodes: Sequence[CacheNode], hit: PrefixHit, index: int) -> int:
        """Return the `host_ref` of page `index` of a further group, or MISSING.

        `nodes`: the path to the hit's node; the hit's host pages follow it.
        """
        depth = self._windows[group - 1].depth_of(index)
        at_host = depth - len(nodes)
        key = node_key(nodes[depth]) if at_host < 0 else self.host.key_of(hit.host_page_ids[at_host])
        page = self.host.find(window_key(key, group, index))
        return MISSING if page < 0 else host_ref(page)

    def hold(self, hit: PrefixHit) -> None:
        """Keep a hit's host pages until `let_go`."""
        for page in hit.all_host_pages:
            self.host.hold(page)

    def let_go(self, hit: PrefixHit) -> None:
        """Undo `hold`."""
        self._release(hit.all_host_pages)

    def promote(self, seq: Holder, hit: PrefixHit, window_places: Iterable[tuple[int, int]]) -> int:
        """Copy a hit's held host pages into pages of a sequence that enters a row, and let them go.

        Args:
            seq: has its first group's pages.
            hit: where it starts.
            window_places: (host page, device page to copy it to) of all further groups.

        Returns:
            The number of pages.
        """
        first = len(hit.page_ids)
        num_pages = 0
        for page, page_id in (*zip(hit.host_page_ids, seq.page_ids[first:], strict=False), *window_places):
            self._copies.from_host(page, page_id)
            num_pages += 1
        self.let_go(hit)
        self.totals.num_pages_from_host += num_pages
        if seq in self.swapped:
            self.forget(seq)
            self.totals.num_swapped_in += 1
        else:
            self.totals.num_promoted_pages += num_pages
        return num_pages

    # --- swapped ----------------------------------------------------------------------------

    def num_pages_of(self, seq: Holder) -> int:
        """Return how many pages `swap_out` would hold."""
        num_tokens = seq.num_settled_tokens
        return -(-num_tokens // self._page_size) + sum(
            -(-num_tokens // group.page_size) - group.first_needed(num_tokens) for group in self._windows
        )

    def swap_out(self, seq: Holder) -> bool:
        """Copy the settled pages of a running sequence, which then loses its own; False if the host lacks the room.

        Pages that the prefix cache owns have keys here too, so they are not copied again when evicted.
        """
        num_tokens = seq.num_settled_tokens
        if not num_tokens:
            return False
        keys = _keys_of(seq)
        keys += [b""] * (-(-num_tokens // self._page_size) - len(keys))
        sources = [(page_id, key) for page_id, key in zip(seq.page_ids, keys, strict=False)]
        ends = [len(sources)]
        for group, table in zip(self._windows, seq.window_tables, strict=True):
            first, end = group.first_needed(num_tokens), -(-num_tokens // group.page_size)
            sources += [(page_id, b"") for page_id in table.page_ids[first - table.first : end - table.first]]
            ends.append(len(sources))
        host = self.host
        found = [host.find(key) if key else -1 for _, key in sources]
        for page in found:
            if page >= 0:
                host.hold(page)
        if found.count(-1) > host.num_available:
            self._release(page for page in reversed(found) if page >= 0)
            return False
        for i, (page_id, key) in enumerate(sources):
            if found[i] < 0:
                found[i] = host.take()
                self._to_host(page_id, found[i])
                if key:
                    host.name(found[i], key)
        windows = tuple(found[start:end] for start, end in pairwise(ends))
        self.swapped[seq] = Swapped(num_tokens, found[: ends[0]], windows)
        self.totals.num_swapped_out += 1
        return True

    def returning(self, seq: Holder, cache: PrefixCache | None) -> tuple[int, PrefixHit] | None:
        """Return where a swapped sequence continues, and its pages: those still in the prefix cache, then the host's.

        None if it is not swapped.
        """
        swapped = self.swapped.get(seq)
        if swapped is None:
            return None
        node, page_ids = None, list[int]()
        if cache is not None:
            max_pages = swapped.num_tokens // self._page_size
            node, page_ids = cache.match(seq.request.namespace, seq.token_ids, max_pages, seq.request.marks)
        windows = tuple([host_ref(page) for page in pages] for pages in swapped.window_page_ids)
        return swapped.num_tokens, PrefixHit(node, page_ids, windows, swapped.page_ids[len(page_ids) :])

    def forget(self, seq: Holder) -> None:
        """Let go of a sequence's host pages, if it is swapped: it has returned, or it ends."""
        swapped = self.swapped.pop(seq, None)
        if swapped is not None:
            self._release(swapped.all_pages)

    def _to_host(self, page_id: int, page: int) -> None:
        self._copies.to_host(page_id, page)
        self.totals.num_pages_to_host += 1

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.host.release(page)


def _keys_of(seq: Holder) -> list[bytes]:
    """Return the keys of the sequence's pages that are in the prefix cache, in order."""
    keys: list[bytes] = []
    node = seq.cache_node
    if node is not None:
        node_key(node)
    while node is not None and node.parent is not None:
        keys.append(node.content_key)
        node = node.parent
    keys.reverse()
    return keys
