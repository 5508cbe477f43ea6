"""What goes to the disk tier and what comes back, by way of the host's pages.

    out   a sequence leaves its row ──▶ its path in the prefix cache is noted, if it was worth something:
          long, or found in the cache
          nothing else to do ──▶ pages of noted paths are copied to the host, unless they are there ──▶ StoreKV
    in    the head of the queue would go on with pages that only the disk has, and reading them is quicker than
          computing ──▶ LoadKV; the request is held beside the queue ──▶ KVLoaded: it is queued again, and finds the
          pages on the host. It does not wait for longer than computing them would take.

Host pages are held while they move. A move is ordered behind the plan that has the copies asked for before it, so that
the worker does both in this order. A page that cannot be read is a miss; if one cannot be written, nothing is written
any more until another worker comes. Pure bookkeeping, like the scheduler that owns it.
"""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

from penstock.core.kv.content_keys import node_key, page_content, window_key
from penstock.core.kv.disk_tier import DiskTier
from penstock.core.kv.host_tier import HostTier
from penstock.core.kv.kv_pages import KVPages, Start
from penstock.core.kv.page_pool import MISSING, CacheNode
from penstock.core.kv.tiers import Tiers
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.prefill_pace import PrefillPace
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import DiskContents, DiskStats, DropStoredKV, KVLoaded, KVStored, LoadKV, StoreKV
from penstock.ipc.page_keys import KEY_BYTES, page_key, root_key

MIN_STORED_TOKENS = 512
"""Prefixes that were computed and never found again are written only if they are at least this long."""

MAX_NOTED = 1 << 16
"""Pages that wait to be written; further ones are not written."""

_STORED_IDLE, _STORED_BUSY = 64, 8
"""Pages in one order to write, without and beside sequences that run."""

_FIRST_US_PER_PAGE = 200.0  # before anything has been read
_WEIGHT = 0.2  # of the newest load in the mean of the time per page
_LEAST_PATIENCE = 0.05  # seconds for a load; otherwise as long as computing would have taken
_PATIENCE_UNKNOWN = 10.0  # seconds, before anything has been computed
ON_DEVICE, ELSEWHERE = 0, 1  # where a page is, if it is not MISSING

Message = StoreKV | LoadKV | DropStoredKV


@dataclass(slots=True)
class DiskTotals:
    """Totals since the scheduler's start; they survive workers and only grow."""

    num_stored_pages: int = 0
    num_loaded_pages: int = 0
    num_damaged_pages: int = 0  # could not be read, or were not what was written
    num_failed_stores: int = 0  # pages that could not be written
    num_given_up: int = 0  # requests that did not wait for the disk any longer


class Noted(NamedTuple):
    """A page of the prefix cache that is to be written."""

    node: CacheNode
    group: int = 0  # page group
    place: int = 0  # in the page table of a further group


class Fetch:
    """What a request waits for."""

    __slots__ = ("deadline", "held", "move_id")

    def __init__(self, held: list[int], deadline: float) -> None:
        self.held = held  # host pages that it goes on with, as far as they are there
        self.deadline = deadline
        self.move_id = -1  # of the order to read; -1: it is queued again


class _Move(NamedTuple):
    keys: list[bytes]
    host_pages: list[int]
    request: Request | None = None  # that waits for it


class DiskMoves:
    """One worker's disk tier, and everything under way to it and from it."""

    __slots__ = (
        "_after_plan", "_fetches", "_kv", "_messages", "_moves", "_next_id", "_noted", "_predict_us", "_store_id",
        "_us_per_page", "_voided", "_waiting", "disk", "is_writing", "totals",
    )  # fmt: skip

    def __init__(
        self,
        disk: DiskTier,
        kv: KVPages,
        waiting: WaitingQueue,
        totals: DiskTotals,
        predict_us: Callable[[int, int], float],
    ) -> None:
        """`predict_us` tells how long it takes to compute so many tokens from a position on; 0: unknown."""
        self.disk = disk
        self.totals = totals
        self.is_writing = True  # until a page cannot be written
        self._messages: list[Message] = []  # for the worker
        self._kv = kv
        self._waiting = waiting
        self._predict_us = predict_us
        self._noted: OrderedDict[bytes, Noted] = OrderedDict()
        self._fetches: dict[Request, Fetch] = {}
        self._moves: dict[int, _Move] = {}
        self._voided: set[int] = set()  # moves whose pages were dropped meanwhile
        self._after_plan: list[Message] = []
        self._next_id = 0
        self._store_id = -1  # of the order to write that is under way
        self._us_per_page = _FIRST_US_PER_PAGE

    # --- from the worker --------------------------------------------------------------------

    def answered(self, message: KVStored | KVLoaded | DiskContents) -> str:
        """Take in what the worker tells. Returns why writing ends with it; empty if it does not."""
        if not isinstance(message, DiskContents):
            return self._moved(message)
        self._listed(message)
        return ""

    def _listed(self, message: DiskContents) -> None:
        places, keys = unpack_int32(message.places), _split(message.keys)
        self.disk.list_held(zip(keys, places, strict=False))
        if message.is_last:
            self.disk.end_list(unpack_int32(message.unusable))

    def _moved(self, message: KVStored | KVLoaded) -> str:
        move = self._moves.pop(message.move_id, None)
        if move is None:
            return ""  # of another time
        ok = [*message.ok[: len(move.keys)], *bytes(len(move.keys) - len(message.ok))]
        if isinstance(message, KVStored):
            return self._stored(message, move, ok)
        self._loaded(message, move, ok)
        return ""

    def _stored(self, message: KVStored, move: _Move, ok: ListOf[int]) -> str:
        self._store_id = -1
        is_void = message.move_id in self._voided
        self._voided.discard(message.move_id)
        for key, page, is_there in zip(move.keys, move.host_pages, ok, strict=True):
            self.disk.end_move(key, is_there=bool(is_there) and not is_void)
            self._host.release(page)
        num_failed = ok.count(0)
        self.totals.num_stored_pages += len(ok) - num_failed
        self.totals.num_failed_stores += num_failed
        if not num_failed or not self.is_writing:
            return ""
        self.is_writing = False
        self._noted.clear()
        return message.error or "a page could not be written"

    def _loaded(self, message: KVLoaded, move: _Move, ok: ListOf[int]) -> None:
        is_void = message.move_id in self._voided
        self._voided.discard(message.move_id)
        fetch = self._fetches.get(move.request) if move.request is not None else None
        if fetch is not None and fetch.move_id != message.move_id:
            fetch = None  # it does not wait for this
        for key, page, is_there in zip(move.keys, move.host_pages, ok, strict=True):
            is_good = bool(is_there) and not is_void
            self.disk.end_move(key, is_there=is_good)
            if is_good:
                self._host.name(page, key)
            if is_good and fetch is not None:
                fetch.held.append(page)  # it goes on holding what was taken for it
            else:
                self._host.release(page)
        self.totals.num_loaded_pages += len(ok) - ok.count(0)
        self.totals.num_damaged_pages += ok.count(0)
        self._us_per_page += _WEIGHT * (message.num_us / len(ok) - self._us_per_page)
        if fetch is not None and move.request is not None:
            self._end(move.request, fetch)

    # --- in -----------------------------------------------------------------------------------

    def admits(self, seq: Sequence, start: Start) -> bool:
        """Return whether the head of the queue may enter a row; otherwise it is held until its pages are read."""
        request = seq.request
        if not self.disk.num_cached or start.is_fork or request.running or request in self._fetches:
            return True
        if seq in self._tiers.swapped:
            return True
        num_tokens, keys = self._found(seq, start)
        if num_tokens <= start.num_tokens:
            return True
        host = self._host
        held = [page for key in keys if (page := host.find(key)) >= 0]
        for page in held:
            host.hold(page)
        lacking = [key for key in keys if host.find(key) < 0]
        if len(lacking) > host.num_available:  # the first ones, as long as that is of use
            lacking = [] if self._kv.windows else lacking[: host.num_available]
        computed_us = self._predict_us(start.num_tokens, num_tokens - start.num_tokens)
        num_queued = sum(len(move.keys) for move in self._moves.values() if move.request is not None)
        loaded_us = (len(lacking) + num_queued) * self._us_per_page
        if not lacking or (computed_us and loaded_us > computed_us):
            self._let_go(held)
            return True
        patience = max(_LEAST_PATIENCE, computed_us / 1e6) if computed_us else _PATIENCE_UNKNOWN
        self._load(lacking, request, Fetch(held, self._kv.now + patience))
        self._waiting.hold(request)
        return False

    def _found(self, seq: Sequence, start: Start) -> tuple[int, list[bytes]]:
        """Return how far all tiers together have a sequence, in tokens, and the keys of what the device lacks of it."""
        kv, host, disk, size = self._kv, self._host, self.disk, self._kv.page_size
        hit = start.hit if not kv.windows else KVPages.find_prefix(kv, seq)  # whether or not its windows are there
        key = root_key(seq.request.namespace) if hit.node is None else node_key(hit.node)
        keys: list[bytes] = []
        for i in range(len(hit.page_ids), seq.num_reusable_tokens // size):
            key = page_key(key, page_content(seq, i, size))
            if host.find(key) < 0 and not disk.is_readable(key):
                break
            keys.append(key)
        if not kv.windows:
            return (len(hit.page_ids) + len(keys)) * size, keys
        return self._with_windows(_path_to(hit.node), keys)

    def _with_windows(self, nodes: list[CacheNode], keys: list[bytes]) -> tuple[int, list[bytes]]:
        """The same where further page groups must be able to start, too."""

        def window_key_of(number: int, index: int) -> bytes:
            depth = windows[number].depth_of(index)
            node = node_key(nodes[depth]) if depth < len(nodes) else keys[depth - len(nodes)]
            return window_key(node, number + 1, index)

        def page_at(number: int, index: int) -> int:
            if windows[number].page(nodes, index) >= 0:
                return ON_DEVICE
            key = window_key_of(number, index)
            return ELSEWHERE if self._host.find(key) >= 0 or self.disk.is_readable(key) else MISSING

        windows = self._kv.windows
        pages_at = [partial(page_at, number) for number in range(len(windows))]
        count, longest = -1, len(nodes) + len(keys)
        while count != longest:
            count = longest
            for group, of_group in zip(windows, pages_at, strict=True):
                longest = group.border(of_group, longest)
        size = self._kv.page_size
        wanted = keys[: max(0, count - len(nodes))]
        for number, group in enumerate(windows):
            indices = range(group.first_needed(count * size), count * size // group.page_size)
            wanted += [window_key_of(number, i) for i in indices if page_at(number, i) == ELSEWHERE]
        return count * size, wanted

    def _load(self, keys: list[bytes], request: Request, fetch: Fetch) -> None:
        self._fetches[request] = fetch
        keys = keys[::-1]  # what is used last is overwritten last: the begin of the path
        pages = [self._host.take() for _ in keys]
        places = [self.disk.begin_load(key) for key in keys]
        fetch.move_id = self._begin(_Move(keys, pages, request))
        self._order(LoadKV(fetch.move_id, b"".join(keys), pack_int32(pages), pack_int32(places)))

    @property
    def wakes_at(self) -> float:
        """When the first request has waited long enough; inf if none waits."""
        return min((fetch.deadline for fetch in self._fetches.values() if fetch.move_id >= 0), default=inf)

    def _expire(self) -> None:
        """Let the requests go on that have waited for too long."""
        for request, fetch in self._fetches.items():
            if fetch.move_id >= 0 and self._kv.now >= fetch.deadline:
                self.totals.num_given_up += 1
                self._end(request, fetch)

    def _end(self, request: Request, fetch: Fetch) -> None:
        """It is queued again, and goes on with what is there by then."""
        fetch.move_id = -1
        self._waiting.release(request)

    def leave(self, request: Request) -> None:
        """A request has got a row, is paused, or has ended: it waits for nothing."""
        fetch = self._fetches.pop(request, None)
        if fetch is not None:
            self._let_go(fetch.held)

    # --- out ----------------------------------------------------------------------------------

    def note(self, seq: Sequence) -> None:
        """A sequence is about to leave its row: what the prefix cache has of it may be worth keeping."""
        node, size = seq.cache_node, self._kv.page_size
        num_pages = seq.num_tree_pages
        if node is None or not num_pages or not self.is_writing:
            return
        node_key(node)
        num_worthy = num_pages if num_pages * size >= MIN_STORED_TOKENS else max(0, seq.num_cached_tokens) // size
        path = _path_to(node)[:num_worthy]
        if not path:
            return
        for each in reversed(path):  # the last one first: what is overwritten first should be the end of a path
            if not self.disk.touch(each.content_key) and len(self._noted) < MAX_NOTED:
                self._noted.setdefault(each.content_key, Noted(each))
        if self._kv.windows:
            # Where others may go on: after the whole, after the prompt, and where this one was found to begin.
            ends = {len(path), (seq.request.num_prompt_tokens - 1) // size, seq.num_cached_tokens // size}
            self._note_windows(path, [end * size for end in ends if 0 < end <= len(path)])

    def _note_windows(self, path: list[CacheNode], borders: list[int]) -> None:
        """What further page groups need to start at one of these positions."""
        for number, group in enumerate(self._kv.windows, 1):
            for index in {i for end in borders for i in range(group.first_needed(end), end // group.page_size)}:
                node = path[group.depth_of(index)]
                key = window_key(node.content_key, number, index)
                if not self.disk.touch(key) and len(self._noted) < MAX_NOTED:
                    self._noted.setdefault(key, Noted(node, number, index))

    def advance(self, *, is_idle: bool) -> None:
        """Do what is due before the next plan."""
        if self._fetches:
            self._expire()
        if self._noted and self._store_id < 0 and self.disk.is_listed:
            self._store(_STORED_IDLE if is_idle else _STORED_BUSY)

    def _store(self, most: int) -> None:
        """Order some of the noted pages to be written."""
        host, disk = self._host, self.disk
        keys: list[bytes] = []
        pages: list[int] = []
        places: list[int] = []
        while self._noted and len(keys) < min(most, max(1, host.num_pages // 2)):
            key, noted = next(iter(self._noted.items()))
            if disk.has(key):
                del self._noted[key]
                continue
            page = host.find(key)
            if page >= 0:
                host.hold(page)
            elif (page_id := self._page_of(noted)) < 0:
                del self._noted[key]  # evicted, and nobody else has it
                continue
            elif (page := host.take()) < 0:
                break  # later
            else:
                self._kv.copies.to_host(page_id, page)
                host.name(page, key)
            del self._noted[key]
            place = disk.begin_store(key)
            if place < 0:
                host.release(page)
                break
            keys.append(key)
            pages.append(page)
            places.append(place)
        if keys:
            self._store_id = self._begin(_Move(keys, pages))
            self._order(StoreKV(self._store_id, b"".join(keys), pack_int32(pages), pack_int32(places)))

    def _page_of(self, noted: Noted) -> int:
        """Return the page of the device that has this content; -1 if it was evicted."""
        node = noted.node
        if node.parent is None or not isinstance(node.key, bytes) or node.parent.children.get(node.key) is not node:
            return -1
        return node.page_id if not noted.group else self._kv.windows[noted.group - 1].page_of(node, noted.place)

    # --- both ---------------------------------------------------------------------------------

    @property
    def num_moving(self) -> int:
        """Pages in orders that are not answered yet; for checks."""
        return sum(len(move.keys) for move in self._moves.values())

    @property
    def num_under_way(self) -> int:
        """Pages that are noted, or being written."""
        return len(self._noted) + sum(len(move.keys) for move in self._moves.values() if move.request is None)

    @property
    def awaits_plan(self) -> bool:
        """Whether a plan must go even if it computes nothing: its copies are waited for."""
        return bool(self._after_plan and self._kv.copies.src)

    def take_messages(self) -> list[Message]:
        """Return the messages for the worker, in order, to be sent after the plan that was made last."""
        messages, self._messages = self._messages, []
        if not self._kv.copies.src:  # a plan has taken those that were asked for
            messages += self._after_plan
            self._after_plan.clear()
        return messages

    def drop_cached(self) -> None:
        """Forget all content, what is under way included."""
        self._noted.clear()
        self._voided.update(self._moves)
        for page in self.held_pages():
            self._host.forget(page)
        for request, fetch in self._fetches.items():
            self._end(request, fetch)
        self.disk.drop_cached()
        self._order(DropStoredKV())

    def stats(self) -> DiskStats:
        """Return the counters as they are sent to the frontends."""
        disk, totals = self.disk, self.totals
        return DiskStats(
            disk.num_places,
            disk.num_cached,
            disk.num_moving,
            self.num_under_way,
            len(self._fetches),
            totals.num_stored_pages,
            totals.num_loaded_pages,
            totals.num_damaged_pages,
            totals.num_failed_stores,
            totals.num_given_up,
            self.is_writing,
            disk.is_listed,
        )

    def awaited(self, request: Request) -> tuple[int, float]:
        """Return how many pages a request waits for, and for how many seconds more at most."""
        fetch = self._fetches.get(request)
        if fetch is None or fetch.move_id < 0:
            return 0, 0.0
        return len(self._moves[fetch.move_id].keys), max(0.0, fetch.deadline - self._kv.now)

    def fetches(self) -> dict[Request, Fetch]:
        """Return what is waited for; for checks."""
        return self._fetches

    def held_pages(self) -> list[int]:
        """Return the host pages that this holds, once for each holder; for checks."""
        of_moves = [page for move in self._moves.values() for page in move.host_pages]
        return of_moves + [page for fetch in self._fetches.values() for page in fetch.held]

    @property
    def _tiers(self) -> Tiers:
        assert self._kv.tiers is not None, "a disk tier needs host pages"
        return self._kv.tiers

    @property
    def _host(self) -> HostTier:
        return self._tiers.host

    def _begin(self, move: _Move) -> int:
        self._next_id += 1
        self._moves[self._next_id] = move
        return self._next_id

    def _order(self, message: Message) -> None:
        (self._after_plan if self._kv.copies.src else self._messages).append(message)

    def _let_go(self, pages: ListOf[int]) -> None:
        for page in reversed(pages):
            self._host.release(page)


def make_moves(
    num_places: int, kv: KVPages, waiting: WaitingQueue, totals: DiskTotals, pace: PrefillPace
) -> DiskMoves | None:
    """Return the moves of a worker; None if it has no disk tier, or nothing to write there."""
    if not num_places or kv.tiers is None or kv.cache is None:
        return None
    return DiskMoves(DiskTier(num_places), kv, waiting, totals, pace.compute_us)


def _path_to(node: CacheNode | None) -> list[CacheNode]:
    path: list[CacheNode] = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def _split(keys: bytes) -> list[bytes]:
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
