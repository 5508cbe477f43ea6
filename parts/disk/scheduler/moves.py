"""Moves pages to the disk tier and back, by way of the host's pages.

    out   a sequence leaves its row ──▶ its path in the prefix cache is noted, if it is worth keeping:
          long, or found in the cache
          when idle ──▶ pages of noted paths are copied to the host, unless they are there already ──▶ StoreKV
    in    the head of the queue could reuse pages that only the disk has, and reading them is quicker than computing
          them ──▶ LoadKV; the request is held beside the queue ──▶ KVLoaded: it is queued again, and finds the
          pages on the host. It waits no longer than computing them would take.

Host pages are held while they move. A move is sent after the plan with the copies that were requested before it, so
that the worker does the copies first. A page that cannot be read is a miss. If a page cannot be written, nothing more
is written until there is another worker. Pure bookkeeping, like the scheduler that owns it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Self

import structlog

from penstock.core.kv.content_keys import node_key, page_content, window_key
from penstock.core.kv.host_tier import HostTier
from penstock.core.kv.kv_pages import KVPages, Start
from penstock.core.kv.lower_tier import LowerTier
from penstock.core.kv.page_pool import MISSING, CacheNode
from penstock.core.scheduling.answers import FromOne
from penstock.core.scheduling.part import Ending, SchedulerPart
from penstock.core.scheduling.step_record import DISK, count_text, duration_text
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import DiskStats, Message
from penstock.ipc.page_keys import KEY_BYTES, page_key, root_key
from penstock.parts.disk.messages import DiskContents, DropStoredKV, KVLoaded, KVStored, LoadKV, StoreKV
from penstock.parts.disk.scheduler.disk_tier import DiskTier

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler

log = structlog.get_logger()

MIN_STORED_TOKENS = 512
"""Prefixes that were never found again in the cache are written only if they are at least this long."""

MAX_NOTED = 1 << 16
"""Most pages that wait to be written; further ones are dropped."""

_STORED_IDLE, _STORED_BUSY = 64, 8
"""Most pages in one StoreKV: without running sequences, and beside them."""

_FIRST_US_PER_PAGE = 200.0  # before anything has been read
_WEIGHT = 0.2  # of the newest load in the mean of the time per page
_LEAST_PATIENCE = 0.05  # seconds to wait for a load, at least; otherwise as long as computing would take
_PATIENCE_UNKNOWN = 10.0  # seconds to wait before any step time is known
ON_DEVICE, ELSEWHERE = 0, 1  # where a page is, unless it is MISSING


@dataclass(slots=True)
class DiskTotals:
    """Totals since the scheduler's start; they survive workers and only grow."""

    num_stored_pages: int = 0
    num_loaded_pages: int = 0
    num_damaged_pages: int = 0  # could not be read, or differed from what was written
    num_failed_stores: int = 0  # pages that could not be written
    num_given_up: int = 0  # requests that stopped waiting for the disk


class Noted(NamedTuple):
    """A page of the prefix cache that is to be written."""

    node: CacheNode
    group: int = 0  # page group
    place: int = 0  # in the page table of a further group


class Fetch:
    """The pages from the disk that a request waits for."""

    __slots__ = ("deadline", "held", "move_id")

    def __init__(self, held: list[int], deadline: float) -> None:
        self.held = held  # host pages for it, those that are there so far
        self.deadline = deadline
        self.move_id = -1  # of its LoadKV; -1: the request is queued again


class _Move(NamedTuple):
    keys: list[bytes]
    host_pages: list[int]
    request: Request | None = None  # that waits for this move


class DiskMoves(SchedulerPart):
    """One worker's disk tier, and all moves to it and from it."""

    stats_field, holds_for = "disk", DISK
    answers = ((KVStored, FromOne), (KVLoaded, FromOne), (DiskContents, FromOne))
    __slots__ = (
        "_after_plan", "_fetches", "_kv", "_messages", "_moves", "_next_id", "_noted", "_predict_us", "_store_id",
        "_us_per_page", "_voided", "_waiting", "disk", "is_writing", "totals",
    )  # fmt: skip

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self | None:
        num_places, kv = scheduler.limits.num_disk_places, scheduler.kv
        if not num_places or kv.tiers is None or kv.cache is None:
            return None
        totals = DiskTotals() if before is None else before.totals
        return cls(DiskTier(num_places), kv, scheduler.waiting, totals, scheduler.pace.compute_us)

    def __init__(
        self,
        disk: DiskTier,
        kv: KVPages,
        waiting: WaitingQueue,
        totals: DiskTotals,
        predict_us: Callable[[int, int], float],
    ) -> None:
        """`predict_us(position, num_tokens)`: microseconds to compute that many tokens from there on; 0: unknown."""
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
        self._store_id = -1  # of the StoreKV under way
        self._us_per_page = _FIRST_US_PER_PAGE

    # --- from the worker --------------------------------------------------------------------

    def answered(self, message: KVStored | KVLoaded | DiskContents) -> tuple[Ending, ...]:
        """Pages have come from the disk or gone to it: requests may go on, and more pages may move."""
        if isinstance(message, DiskContents):
            self._listed(message)
        elif reason := self._moved(message):
            log.error("disk KV: writing stopped", reason=reason)
        return ()

    def _listed(self, message: DiskContents) -> None:
        places, keys = unpack_int32(message.places), _split(message.keys)
        self.disk.list_held(zip(keys, places, strict=False))
        if message.is_last:
            self.disk.end_list(unpack_int32(message.unusable))
            log.info("disk KV listed", pages=self.disk.num_cached, room_for=self.disk.num_places)

    def _moved(self, message: KVStored | KVLoaded) -> str:
        """Returns why nothing more will be written; empty if writing goes on."""
        move = self._moves.pop(message.move_id, None)
        if move is None:
            return ""  # of a forgotten move
        ok = [*message.ok[: len(move.keys)], *bytes(max(0, len(move.keys) - len(message.ok)))]
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
            fetch = None  # the request waits for another move
        for key, page, is_there in zip(move.keys, move.host_pages, ok, strict=True):
            is_good = bool(is_there) and not is_void
            self.disk.end_move(key, is_there=is_good)
            if is_good:
                self._host.name(page, key)
            if is_good and fetch is not None:
                fetch.held.append(page)  # the request takes over the hold on the page
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
        if len(lacking) > host.num_available:  # load only the first ones, where a part is of use
            lacking = [] if self._kv.windows else lacking[: host.num_available]
        computed_us = self._predict_us(start.num_tokens, num_tokens - start.num_tokens)
        num_queued = sum(len(move.keys) for move in self._moves.values() if move.request is not None)
        loaded_us = (len(lacking) + num_queued) * self._us_per_page
        if not lacking or (computed_us and loaded_us > computed_us):
            self._let_go(held)
            return True
        patience = max(_LEAST_PATIENCE, computed_us / 1e6) if computed_us else _PATIENCE_UNKNOWN
        self._load(lacking, request, Fetch(held, self._kv.now + patience))
        self._waiting.hold(request, DISK)
        return False

    def _found(self, seq: Sequence, start: Start) -> tuple[int, list[bytes]]:
        """Return how many tokens of a sequence all tiers together have, and the keys of pages the device lacks."""
        kv, host, disk, size = self._kv, self._host, self.disk, self._kv.page_size
        hit = start.hit if not kv.windows else KVPages.find_prefix(kv, seq)  # even if its window pages are not there
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
        """Do the same for several page groups, all of which must be able to start there."""

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
        keys = keys[::-1]  # the page used last is overwritten last: the beginning of the path
        pages = [self._host.take() for _ in keys]
        places = [self.disk.begin_load(key) for key in keys]
        fetch.move_id = self._begin(_Move(keys, pages, request))
        self._order(LoadKV(fetch.move_id, b"".join(keys), pack_int32(pages), pack_int32(places)))

    @property
    def wakes_at(self) -> float:
        """When the first waiting request gives up; inf if none waits."""
        return min((fetch.deadline for fetch in self._fetches.values() if fetch.move_id >= 0), default=inf)

    def _expire(self) -> None:
        """Queue requests again that have waited too long."""
        for request, fetch in self._fetches.items():
            if fetch.move_id >= 0 and self._kv.now >= fetch.deadline:
                self.totals.num_given_up += 1
                self._end(request, fetch)

    def _end(self, request: Request, fetch: Fetch) -> None:
        """Queue a request again; it goes on with the pages that are there by then."""
        fetch.move_id = -1
        self._waiting.release(request)

    def entered(self, seq: Sequence, num_cached: int) -> int:
        self.leave(seq.request)
        return num_cached

    def leave(self, request: Request) -> None:
        """A request has got a row, is paused, or has ended: it waits for nothing."""
        fetch = self._fetches.pop(request, None)
        if fetch is not None:
            self._let_go(fetch.held)

    # --- out ----------------------------------------------------------------------------------

    def keeps_pages(self, seq: Sequence) -> bool:
        self._note(seq)
        return False

    def _note(self, seq: Sequence) -> None:
        """Note a sequence's path in the prefix cache if it is worth keeping."""
        node, size = seq.cache_node, self._kv.page_size
        num_pages = seq.num_tree_pages
        if node is None or not num_pages or not self.is_writing:
            return
        node_key(node)
        num_worthy = num_pages if num_pages * size >= MIN_STORED_TOKENS else max(0, seq.num_cached_tokens) // size
        path = _path_to(node)[:num_worthy]
        if not path:
            return
        for each in reversed(path):  # the last one first: the end of a path should be overwritten first
            if not self.disk.touch(each.content_key) and len(self._noted) < MAX_NOTED:
                self._noted.setdefault(each.content_key, Noted(each))
        if self._kv.windows:
            # Other sequences may go on after the whole, after the prompt, or where this one began after a cache hit.
            ends = {len(path), (seq.request.num_prompt_tokens - 1) // size, seq.num_cached_tokens // size}
            self._note_windows(path, [end * size for end in ends if 0 < end <= len(path)])

    def _note_windows(self, path: list[CacheNode], borders: list[int]) -> None:
        """Note the pages that further page groups need to start at one of these positions."""
        for number, group in enumerate(self._kv.windows, 1):
            for index in {i for end in borders for i in range(group.first_needed(end), end // group.page_size)}:
                node = path[group.depth_of(index)]
                key = window_key(node.content_key, number, index)
                if not self.disk.touch(key) and len(self._noted) < MAX_NOTED:
                    self._noted.setdefault(key, Noted(node, number, index))

    def advance(self, *, is_idle: bool) -> tuple[()]:
        """Before the next plan: end waits that took too long, and order noted pages to be written."""
        if self._fetches:
            self._expire()
        if self._noted and self._store_id < 0 and self.disk.is_listed:
            self._store(_STORED_IDLE if is_idle else _STORED_BUSY)
        return ()

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
                del self._noted[key]  # evicted, and in no other tier
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
        """Pages in unanswered orders to the worker; for checks."""
        return sum(len(move.keys) for move in self._moves.values())

    @property
    def num_unfinished(self) -> int:
        """Pages that are noted, or being written."""
        return len(self._noted) + sum(len(move.keys) for move in self._moves.values() if move.request is None)

    @property
    def awaits_plan(self) -> bool:
        """Whether a plan must be sent even if it computes nothing, because messages wait behind its copies."""
        return bool(self._after_plan and self._kv.copies.src)

    def take_behind_plan(self) -> ListOf[Message]:
        messages, self._messages = self._messages, []
        if not self._kv.copies.src:  # a plan has taken all requested copies
            messages += self._after_plan
            self._after_plan.clear()
        return messages

    def drop_cached(self) -> None:
        """Forget all content, including pages under way."""
        self._noted.clear()
        self._voided.update(self._moves)
        for page in self.held_host_pages():
            self._host.forget(page)
        for request, fetch in self._fetches.items():
            self._end(request, fetch)
        self.disk.drop_cached()
        self._order(DropStoredKV())

    def check(self, scheduler: "Scheduler") -> Iterator[tuple[bool, str]]:
        disk, places = self.disk, self.disk.places()
        listed = [place for of_state in places.values() for place in of_state]
        yield len(set(listed)) == len(listed), "a place on the disk is free, cached, moving or unlisted, once"
        yield len(listed) + disk.num_unusable == disk.num_places, "every place on the disk is in some state"
        yield disk.num_moving == self.num_moving, "a place moves with an order for it"
        waiting = set(scheduler.waiting.requests())
        for request, fetch in self.fetches().items():
            yield request in waiting and not request.running, f"{request.request_id}: waits for the disk, has no row"
            yield fetch.move_id < 0 or scheduler.waiting.is_held(request), f"{request.request_id}: is held meanwhile"

    def stats(self) -> DiskStats:
        """Return the counters as they are sent to the frontends."""
        disk, totals = self.disk, self.totals
        return DiskStats(
            disk.num_places,
            disk.num_cached,
            disk.num_moving,
            self.num_unfinished,
            len(self._fetches),
            totals.num_stored_pages,
            totals.num_loaded_pages,
            totals.num_damaged_pages,
            totals.num_failed_stores,
            totals.num_given_up,
            self.is_writing,
            disk.is_listed,
        )

    def tier(self) -> dict[str, int]:
        disk = self.disk
        return {
            "places": disk.num_places,
            "cached": disk.num_cached,
            "moving": disk.num_moving,
            "free": disk.num_free,
            "unlisted": disk.num_unlisted,
        }

    def why(self, request: Request) -> str:
        num_pages, seconds = self.awaited(request)
        return f"{count_text(num_pages, 'page')}, for at most {duration_text(seconds * 1e6)}"

    def awaited(self, request: Request) -> tuple[int, float]:
        """Return how many pages a request waits for, and for how many seconds more at most."""
        fetch = self._fetches.get(request)
        if fetch is None or fetch.move_id < 0:
            return 0, 0.0
        return len(self._moves[fetch.move_id].keys), max(0.0, fetch.deadline - self._kv.now)

    def fetches(self) -> dict[Request, Fetch]:
        """Return what each request waits for; for checks."""
        return self._fetches

    def held_host_pages(self) -> list[int]:
        """Return the host pages held here, once per holder; for checks."""
        of_moves = [page for move in self._moves.values() for page in move.host_pages]
        return of_moves + [page for fetch in self._fetches.values() for page in fetch.held]

    @property
    def _tiers(self) -> LowerTier:
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


def _path_to(node: CacheNode | None) -> list[CacheNode]:
    path: list[CacheNode] = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def _split(keys: bytes) -> list[bytes]:
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
