"""Copies of rows' states: if some layers keep a state of each row, a cached prefix can be reused only with one.

    a prompt    |--page--|--page--|--page--|--page--|-
    snapshots            ^                 ^           each belongs to the tree's node whose page ends there

A sequence starts behind the deepest node of its prefix that has a snapshot. Snapshots are taken

  - behind the last full page of each prompt, from where another prompt may go on;
  - where a prompt departs from what is cached, usually at the end of a system prompt: the next one can start there;
  - at page borders of rows that decode: each row keeps only the latest, for the next turn of the conversation.

The worker copies a row's state when the row has computed all positions before a border and none behind it, that is,
before the forward pass of the plan that goes on from there. So chunks of prompts end at the wanted borders. A plan's
saves come before its loads, in the order in which the scheduler decides on them: running rows first, then admissions.
A snapshot belongs to its sequence until the page has settled, and then to the page's node. The least recently used
snapshot makes room for a new one.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.core.kv.holder import Holder, PageTables, RowHolder
from penstock.core.kv.page_pool import CacheNode, PrefixHit
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import CacheMiss, SnapshotStats


@dataclass(slots=True)
class SnapshotTotals:
    """Totals since the scheduler's start."""

    num_saved: int = 0
    num_loaded: int = 0
    num_evicted: int = 0  # to make room
    misses: Counter[CacheMiss] = field(default_factory=Counter)  # of sequences that entered a row


class Snapshot(NamedTuple):
    """Where a state is kept, and whether the next snapshot of the same row replaces it."""

    place: int
    is_rolling: bool


class Snapshots:
    """The places for states in the worker, and their contents."""

    __slots__ = (
        "_borders", "_evicted", "_free", "_kept", "_loads", "_page_size", "_pending", "_rolling", "_saves",
        "num_places", "totals",
    )  # fmt: skip

    def __init__(self, num_places: int, page_size: int, totals: SnapshotTotals) -> None:
        self.num_places = num_places
        self.totals = totals
        self._page_size = page_size
        self._free = list(range(num_places - 1, -1, -1))
        self._kept: OrderedDict[CacheNode, Snapshot] = OrderedDict()  # least recently used first
        self._evicted: set[CacheNode] = set()  # nodes that have lost their snapshot
        self._borders: dict[PageTables, set[int]] = {}  # positions at which a running prompt's state is wanted
        self._pending: dict[PageTables, dict[int, Snapshot]] = {}  # number of pages before the border -> snapshot
        self._rolling: dict[PageTables, CacheNode] = {}  # the latest snapshot of each row that decodes
        self._saves: dict[int, int] = {}  # place -> row, of the next plan
        self._loads: dict[int, int] = {}  # row -> place

    @property
    def num_used(self) -> int:
        return self.num_places - len(self._free)

    def stats(self) -> SnapshotStats:
        """Return the counts as they are sent to the frontends."""
        totals = self.totals
        counts = totals.num_saved, totals.num_loaded, totals.num_evicted
        return SnapshotStats(self.num_places, self.num_used, *counts, {str(why): n for why, n in totals.misses.items()})

    def cut(self, hit: PrefixHit) -> PrefixHit:
        """Return the part of a hit that ends with a snapshot."""
        node, num_lacking, lacks_evicted = hit.node, 0, False
        while node is not None and node.parent is not None and node not in self._kept:
            lacks_evicted |= node in self._evicted
            node, num_lacking = node.parent, num_lacking + 1
        num_pages = len(hit.page_ids) - num_lacking
        return PrefixHit(
            node if num_pages else None,
            hit.page_ids[:num_pages],
            num_lacking=num_lacking,
            lacks_evicted=lacks_evicted,
        )

    def start(self, seq: RowHolder, hit: PrefixHit) -> None:
        """A sequence has entered a row after a hit."""
        num_pages = len(hit.page_ids)
        if hit.node is not None:
            snapshot = self._kept[hit.node]
            self._kept[hit.node] = snapshot._replace(is_rolling=False)
            self._kept.move_to_end(hit.node)
            self._loads[seq.row] = snapshot.place
            self.totals.num_loaded += 1
        last = (len(seq.token_ids) - 1) // self._page_size
        wanted = {num_pages + hit.num_lacking, last}
        self._borders[seq] = {pages * self._page_size for pages in wanted if pages > num_pages}
        seq.cache_miss = ""
        if num_pages < seq.num_reusable_tokens // self._page_size:
            seq.cache_miss = "no_pages"
            if hit.num_lacking:
                seq.cache_miss = "snapshot_evicted" if hit.lacks_evicted else "no_snapshot"
            self.totals.misses[seq.cache_miss] += 1

    def chunk(self, seq: RowHolder, start: int, num_tokens: int) -> int:
        """A prompt's next chunk begins; return how many of the `num_tokens` allowed it should have."""
        borders = self._borders.get(seq)
        if not borders:
            return num_tokens
        if start in borders:
            borders.remove(start)
            self._save(seq, start, is_rolling=False)
        return min([num_tokens, *(border - start for border in borders if border > start)])

    def decodes_on(self, seq: RowHolder, start: int) -> None:
        """A row that decodes begins a page."""
        if not start % self._page_size:
            self._save(seq, start, is_rolling=True)

    def settled(self, seq: Holder) -> None:
        """More pages of a sequence may be in the tree: give their nodes the snapshots taken at their ends."""
        pending = self._pending.get(seq)
        if not pending:
            return
        for num_pages in [each for each in pending if each <= seq.num_tree_pages]:
            self._keep(seq, num_pages, pending.pop(num_pages))

    def leave(self, seq: PageTables) -> None:
        """A sequence leaves its row: give up its snapshots that have not settled.

        Plans in flight may still write to their places, but before the next plan that saves there.
        """
        self._borders.pop(seq, None)
        self._rolling.pop(seq, None)
        for snapshot in self._pending.pop(seq, {}).values():
            self._free.append(snapshot.place)

    def forget(self, node: CacheNode) -> None:
        """A node is evicted from the tree."""
        self._evicted.discard(node)
        if (snapshot := self._kept.pop(node, None)) is not None:
            self._free.append(snapshot.place)

    def take(self) -> tuple[bytes, bytes]:
        """Return the next plan's loads and saves, each int32[N, 2] of row and place."""
        loads = pack_int32([number for pair in self._loads.items() for number in pair])
        saves = pack_int32([number for place, row in self._saves.items() for number in (row, place)])
        self._loads.clear()
        self._saves.clear()
        return loads, saves

    def held(self) -> tuple[dict[CacheNode, int], list[int], list[int]]:
        """Return the places of nodes, those of sequences, and the free ones; for checks."""
        pending = [snapshot.place for each in self._pending.values() for snapshot in each.values()]
        return {node: snapshot.place for node, snapshot in self._kept.items()}, pending, self._free[:]

    def _save(self, seq: RowHolder, border: int, *, is_rolling: bool) -> None:
        place = self._place()
        if place < 0:
            return
        self._saves[place] = seq.row
        self.totals.num_saved += 1
        num_pages = border // self._page_size
        if num_pages <= seq.num_tree_pages:
            self._keep(seq, num_pages, Snapshot(place, is_rolling))
        else:
            self._pending.setdefault(seq, {})[num_pages] = Snapshot(place, is_rolling)

    def _place(self) -> int:
        """A free place, or that of the least recently used snapshot; -1 if all belong to unsettled pages."""
        if self._free:
            return self._free.pop()
        if not self._kept:
            return -1
        node, snapshot = self._kept.popitem(last=False)
        self._evicted.add(node)
        self.totals.num_evicted += 1
        return snapshot.place

    def _keep(self, seq: Holder, num_pages: int, snapshot: Snapshot) -> None:
        node = seq.cache_node
        for _ in range(seq.num_tree_pages - num_pages):
            assert node is not None
            node = node.parent
        assert node is not None
        if node in self._kept:  # the same text was computed twice
            self._free.append(snapshot.place)
        else:
            self._kept[node] = snapshot
            self._evicted.discard(node)
        if snapshot.is_rolling:
            before = self._rolling.get(seq)
            self._rolling[seq] = node
            if before is not None and before in self._kept and self._kept[before].is_rolling:
                self._free.append(self._kept.pop(before).place)
