"""The decode engine's side of a handover: takes pages for prompts that a prefill engine computes, and has them filled.

    the head of the queue lacks much of its prompt ──▶ pages are taken as if to compute it here; the request is held
          beside the queue; the prefill engine gets the prompt (`departures.py` is its side), and our worker the
          pages to fill
    all pages are filled, and the prompt is computed ──▶ HandoverTaken ──▶ HandoverReleased: the pages are valid
    the prefix cache gets the pages, the request is queued again, and finds all of its prompt but the last page

Until then nothing depends on the other engine. If it is lost, a transport fails, or the client leaves, the pages are
freed once the worker has said that it no longer writes to them. The prompt is then computed by the next engine that the
request names, or here. Pure bookkeeping, like the scheduler that owns it.
"""

import secrets
from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from penstock.core.kv.kv_pages import KVPages, Start
from penstock.core.kv.page_pool import CacheNode
from penstock.core.kv.window_pages import WindowTable
from penstock.core.scheduling.step_record import PREFILL
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import (
    AbortRequest,
    AddRequest,
    HandoverReleased,
    HandoverTaken,
    KVSource,
    SamplingParams,
    SequenceBill,
)
from penstock.parts.handover.messages import KVReceived, ReceiveKV, StopReceivingKV

CONNECT_SECONDS = 2.0
"""How long a prompt waits for the first answer of a prefill engine."""

READ_SECONDS = 60.0
"""How long pages may take to come after their prompt was computed: an unreachable engine sends no error."""

_names = map(f"handover-{secrets.token_hex(6)}-{{}}".format, count(1))
"""Names are unique across engines: a prefill engine may serve several decode engines."""

RoomFor = Callable[[Sequence, Start], tuple[int, int]]
"""Returns how many pages a sequence needs, and how many it could have (`Admissions`)."""

Peers = Mapping[str, tuple[KVSource, ...] | None]
"""Prefill engines by address, with how their ranks' pages are read. None: connecting; no entry: not ready."""

Namespace = Callable[[str, int], object]
"""Returns which pages a prompt of a given length may share (`WorkerLimits.namespace`)."""


@dataclass(slots=True)
class HandoverTotals:
    """Totals since the scheduler's start; they survive workers and only grow."""

    num_received: int = 0  # prompts
    num_received_pages: int = 0
    num_received_bytes: int = 0
    num_failed: int = 0
    num_sent: int = 0
    num_sent_pages: int = 0
    failed_transports: tuple[str, ...] = ()


class Order(NamedTuple):
    """A message for the scheduler of a prefill engine."""

    address: str
    message: AddRequest | AbortRequest | HandoverTaken


class Arrival:
    """Pages that are being filled for a request. It holds pages as a sequence does."""

    __slots__ = (
        "address", "cache_node", "device_us", "due_at", "handover_id", "is_computed", "is_read", "is_there",
        "launch_limit", "max_computed_tokens", "num_cached_tokens", "num_pages", "num_tree_pages",
        "num_unsettled_tokens", "page_ids", "page_seconds", "request", "token_ids", "window_tables",
    )  # fmt: skip

    def __init__(self, request: Request, token_ids: "array[int]", address: str) -> None:
        self.request = request
        self.handover_id = ""
        self.num_pages = 0  # to be filled
        self.device_us = 0.0  # the prompt's time at the prefill engine
        self.num_cached_tokens = 0  # found in a prefix cache, here or there
        self.address = address
        self.token_ids = token_ids  # of whole pages in every page group
        self.num_unsettled_tokens = 0
        self.page_ids: list[int] = []
        self.window_tables: list[WindowTable] = []
        self.cache_node: CacheNode | None = None
        self.num_tree_pages = 0
        self.launch_limit = 0
        self.max_computed_tokens = len(token_ids)
        self.page_seconds = 0.0
        self.is_computed = False  # the prefill engine has said so
        self.due_at = inf  # until when our worker may read
        self.is_read = False  # our worker has read all pages
        self.is_there = False  # its pages are in the prefix cache

    @property
    def num_settled_tokens(self) -> int:
        return len(self.token_ids) - self.num_unsettled_tokens

    @property
    def num_reusable_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def owes_prompt_logprobs(self) -> bool:
        return False


class Arrivals:
    """The pages that one worker's pool gets from other engines."""

    __slots__ = (
        "_arrivals", "_by_id", "_connecting", "_ending", "_kv", "_least", "_messages", "_namespace",
        "_totals", "_unit", "_unpinned", "_waiting", "orders", "peers", "room_for",
    )  # fmt: skip

    def __init__(
        self,
        kv: KVPages,
        waiting: WaitingQueue,
        totals: HandoverTotals,
        namespace: Namespace,
        least: int,
    ) -> None:
        """
        Args:
            kv: the worker's pages.
            waiting: where requests are held.
            totals: what is counted.
            namespace: which pages a prompt may share.
            least: tokens that a prompt must lack to be computed elsewhere.
        """
        self.peers: Peers = {}
        """Set and kept up to date by the owner of the connections to prefill engines."""
        self.room_for: RoomFor = lambda seq, start: (0, 0)
        """Set by the scheduler, whose admissions know it."""
        self.orders: list[Order] = []
        """Messages for prefill engines; the owner of the sockets takes them."""
        self._kv = kv
        self._waiting = waiting
        self._totals = totals
        self._namespace = namespace
        self._least = least
        self._unit = max(kv.page_size, *(group.page_size for group in kv.windows)) if kv.windows else kv.page_size
        self._arrivals: dict[Request, Arrival] = {}
        self._by_id: dict[str, Arrival] = {}  # arrivals that are not there yet
        self._ending: dict[str, Arrival] = {}  # given up; the worker may still write to their pages
        self._unpinned: dict[Request, list[Arrival]] = {}  # without pages; what they cost is not billed yet
        self._connecting: dict[Request, float] = {}  # until when each waits
        self._messages: list[ReceiveKV | StopReceivingKV] = []

    # --- a request at the head of the queue --------------------------------------------------

    def admits(self, seq: Sequence, start: Start) -> bool:
        """Return whether the sequence may enter a row; otherwise it is held until its pages come, or fail to come."""
        request = seq.request
        if not request.prefill_at or request.running or start.is_fork:
            return True
        arrival = self._arrivals.get(request)
        if arrival is not None:
            if not arrival.is_there:  # other holders release all that is held
                self._waiting.hold(request, PREFILL)
            return arrival.is_there
        if self._kv.tiers is not None and seq in self._kv.tiers.swapped:
            return True
        if request in self._unpinned:
            return True  # it gave up such pages before: two engines short of pages could go on like that for ever
        num_tokens = seq.num_reusable_tokens // self._unit * self._unit
        if num_tokens - start.num_tokens < self._least:
            return True
        if self._namespace("", num_tokens) != self._namespace("", request.num_prompt_tokens):
            return True  # positions of the shorter prompt would mean something else
        address = next((each for each in request.prefill_at if self.peers.get(each)), "")
        if not address:
            return not self._waits_for_connection(request)
        self._connecting.pop(request, None)
        return not self._begin(seq, start, num_tokens, address)

    def _waits_for_connection(self, request: Request) -> bool:
        now = self._kv.now
        is_connecting = any(self.peers.get(each, ()) is None for each in request.prefill_at)
        if not is_connecting or self._connecting.setdefault(request, now + CONNECT_SECONDS) <= now:
            self._connecting.pop(request, None)
            request.prefill_at = ()
            return False
        self._waiting.hold(request, PREFILL)
        return True

    def _begin(self, seq: Sequence, start: Start, num_tokens: int, address: str) -> bool:
        """Take pages and have them filled; False if there are not enough."""
        kv, request = self._kv, seq.request
        num_of_windows = sum(num_tokens // group.page_size - group.first_needed(num_tokens) for group in kv.windows)
        num_of_windows += sum(ref < 0 for refs in start.hit.window_page_ids for ref in refs)  # from the host
        num_pages = num_tokens // kv.page_size - len(start.page_ids)
        needed, available = self.room_for(seq, start)
        if available < max(needed, num_pages + num_of_windows):
            return False
        arrival = Arrival(request, seq.token_ids[:num_tokens], address)
        arrival.num_unsettled_tokens = num_tokens - start.num_tokens
        arrival.num_cached_tokens = start.num_tokens
        arrival.cache_node = kv.hold(request.namespace, start.hit)
        arrival.num_tree_pages = len(start.hit.page_ids)
        kv.pool.share(start.page_ids)
        kv.reserve(num_pages + num_of_windows)
        arrival.page_ids = start.page_ids + kv.pool.allocate(num_pages)
        if kv.start_with(arrival, start.hit, start.num_tokens):
            kv.settle(arrival)
        pages = [(0, i, arrival.page_ids[i]) for i in range(start.num_tokens // kv.page_size, len(arrival.page_ids))]
        for number, (group, table) in enumerate(zip(kv.windows, arrival.window_tables, strict=True), 1):
            group.free_behind(table, num_tokens, 0 if kv.cache is None else kv.cache.clock)
            pages += [
                (number, index, group.take(table)) for index in range(table.num_pages, num_tokens // group.page_size)
            ]
        arrival.num_pages = len(pages)
        arrival.handover_id = next(_names)
        self._arrivals[request] = self._by_id[arrival.handover_id] = arrival
        self._waiting.hold(request, PREFILL)
        sources = self.peers[address]
        assert sources is not None, "it is ready"
        columns = pack_int32(number for page in pages for number in page)
        self._messages.append(ReceiveKV(arrival.handover_id, sources, columns))
        self._order(arrival, _order_of(seq, arrival, start.num_tokens, kv.now))
        return True

    # --- what the others tell -----------------------------------------------------------------

    def received(self, message: KVReceived) -> str:
        """The worker has filled the pages, or no longer writes to them. Returns an error, or "" if all is well."""
        self._totals.num_received_bytes += message.num_bytes
        self._totals.failed_transports = message.failed_transports
        arrival = self._ending.pop(message.handover_id, None)
        if arrival is not None:
            self._kv.release(arrival)
            is_late = arrival.due_at <= self._kv.now
            return f"its pages did not come within {READ_SECONDS:.0f} s" if is_late else ""
        arrival = self._by_id.get(message.handover_id)
        if arrival is None:
            return ""
        arrival.is_read = True
        if message.error:
            self._fail(arrival)
            return message.error
        self._advance(arrival)
        return ""

    def computed(
        self, handover_id: str, error: str, num_cached_tokens: int = 0, bill: SequenceBill | None = None
    ) -> bool:
        """The prefill engine has computed a prompt, or failed. Returns whether a request waits for that prompt."""
        arrival = self._by_id.get(handover_id)
        if arrival is None:
            return False
        arrival.is_computed = True
        arrival.due_at = self._kv.now + READ_SECONDS
        arrival.num_cached_tokens = max(arrival.num_cached_tokens, num_cached_tokens)
        arrival.device_us = 0.0 if bill is None else bill.device_us
        if error:
            self._fail(arrival)
        else:
            self._advance(arrival)
        return True

    def released(self, message: HandoverReleased) -> None:
        """The prefill engine says whether it kept the pages while they were read."""
        arrival = self._by_id.get(message.request_id)
        if arrival is None or not (arrival.is_read and arrival.is_computed):
            return
        if not message.is_right:
            self._fail(arrival)
            return
        self._totals.num_received += 1
        self._totals.num_received_pages += arrival.num_pages
        arrival.num_unsettled_tokens = 0
        arrival.is_there = True
        del self._by_id[arrival.handover_id]
        self._kv.settle(arrival)
        self._waiting.release(arrival.request)

    def peers_changed(self) -> None:
        """Prefill engines have come or gone: requests that wait for a lost one go elsewhere."""
        for arrival in [each for each in self._by_id.values() if not self.peers.get(each.address)]:
            self._fail(arrival)
        for request in list(self._connecting):
            self._waiting.release(request)

    def _advance(self, arrival: Arrival) -> None:
        if arrival.is_read and arrival.is_computed:
            self._order(arrival, HandoverTaken(arrival.handover_id))

    # --- ends ---------------------------------------------------------------------------------

    def leave(self, request: Request) -> None:
        """A request has got a row, is paused, or has ended: it waits for nothing."""
        self._connecting.pop(request, None)
        self._unpinned.pop(request, None)
        arrival = self._arrivals.get(request)
        if arrival is not None:
            self._drop(arrival)

    def unpin(self) -> bool:
        """The head of the queue lacks pages: let arrived pages be evicted like any others in the prefix cache.

        Returns whether there were any.
        """
        there = [each for each in self._arrivals.values() if each.is_there]
        for arrival in there:
            self._drop(arrival)
            self._unpinned.setdefault(arrival.request, []).append(arrival)
        return bool(there)

    def give_up_one(self) -> None:
        """Other engines' prompts need the pages of the latest arrival, unless those of another one come free anyway."""
        if self._by_id and not self._ending:
            self._fail(next(reversed(self._by_id.values())))

    def abandon(self) -> None:
        """The worker is gone, and all pages with it: only tell the prefill engines."""
        for arrival in self._by_id.values():
            self._order(arrival, AbortRequest(arrival.handover_id))

    def _fail(self, arrival: Arrival) -> None:
        """Queue the request again; another engine, or this one, will compute its prompt."""
        self._totals.num_failed += 1
        request = arrival.request
        request.prefill_at = tuple(each for each in request.prefill_at if each != arrival.address)
        self._drop(arrival)
        self._waiting.release(request)

    def _drop(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.request]
        if not arrival.is_there:
            del self._by_id[arrival.handover_id]
            self._order(arrival, AbortRequest(arrival.handover_id))
            if not arrival.is_read:
                self._ending[arrival.handover_id] = arrival
                self._messages.append(StopReceivingKV(arrival.handover_id))
                return
        self._kv.release(arrival)

    def _order(self, arrival: Arrival, message: AddRequest | AbortRequest | HandoverTaken) -> None:
        self.orders.append(Order(arrival.address, message))

    # --- for others -----------------------------------------------------------------------------

    @property
    def wakes_at(self) -> float:
        """When the first request stops waiting for an engine's answer, or for pages; inf if none waits."""
        due = (arrival.due_at for arrival in self._by_id.values() if not arrival.is_read)
        return min(min(self._connecting.values(), default=inf), min(due, default=inf))

    def expire(self) -> None:
        """Release requests that have waited too long."""
        for request, until in self._connecting.items():
            if until <= self._kv.now:
                self._waiting.release(request)
        for arrival in [each for each in self._by_id.values() if each.due_at <= self._kv.now and not each.is_read]:
            self._fail(arrival)

    def take_messages(self) -> list[ReceiveKV | StopReceivingKV]:
        """Return the messages for the worker; call this after sending the plan with the copies requested so far."""
        if self._kv.copies.src:
            return []
        messages, self._messages = self._messages, []
        return messages

    @property
    def awaits_plan(self) -> bool:
        """Whether a plan must be sent even if it computes nothing: its copies must come before pages are filled."""
        return bool(self._messages and self._kv.copies.src)

    def entered(self, seq: Sequence, num_tokens: int) -> int:
        """A sequence has got a row, and begins after `num_tokens`: end its wait, and bill the prefill engine's time.

        Returns how many of these tokens came from a prefix cache, here or there.
        """
        request = seq.request
        arrivals = self._unpinned.get(request, [])
        if (last := self._arrivals.get(request)) is not None:
            arrivals = [*arrivals, last]
        self.leave(request)
        for arrival in arrivals:
            if seq.account is not None and arrival.is_there:
                seq.account.num_us += arrival.device_us
            num_tokens = min(num_tokens, arrival.num_cached_tokens)
        return num_tokens

    @property
    def num_waiting(self) -> int:
        """Requests that wait for pages."""
        return len(self._by_id) + len(self._connecting)

    def awaited(self, request: Request) -> str:
        """Return what a request waits for; empty if it does not."""
        if request in self._connecting:
            return "an answer of a prefill engine"
        arrival = self._arrivals.get(request)
        if arrival is None or arrival.is_there:
            return ""
        return f"{arrival.num_unsettled_tokens:,} tokens that a prefill engine computes"

    def holders(self) -> ListOf[Arrival]:
        """Return the arrivals that hold pages; for checks."""
        return [*self._arrivals.values(), *self._ending.values()]


def _order_of(seq: Sequence, arrival: Arrival, num_there: int, now: float) -> AddRequest:
    """The request to the prefill engine: the tokens whose pages are handed over, on behalf of the same tenant."""
    request = seq.request
    left = 0.0 if request.deadline == inf else max(0.001, request.deadline - now)
    due = 0.0 if request.first_token_due == inf else max(0.001, request.first_token_due - now)
    return AddRequest(
        arrival.handover_id,
        pack_int32(arrival.token_ids),
        replace(SamplingParams(max_tokens=1), temperature=0.0),
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        group=request.group,
        seconds_left=left,
        weight=request.weight,
        ttft_left=due,
        handover_from=num_there,
        is_background=request.is_background,
    )
