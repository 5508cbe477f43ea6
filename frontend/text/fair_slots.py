"""A few slots shared by many clients: the client that has used them least goes first, and none can take them all.

    client asks ──▶ a slot is free and it may have it ──▶ it holds the slot; the seconds are added to its account
                 └▶ it waits; a free slot goes to the waiting client that holds the fewest, then to the lowest account

Accounts are halved every `HALVING_SECONDS`, so a client that pauses for a while starts afresh. What may take how long
decides who may have the last slot:

    short    any client: it is given back soon
    long     nobody: long work holds all slots but one, however many clients ask for it
    unknown  a client that holds no more than the others may, and whose account is at most `LIGHT_SECONDS`

So whoever asks for something short waits for other short work only. All accounts are halved alike, so their order stays
as it is until one is charged, and who is next is found in a heap: a flood of clients costs no more than one.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic
from typing import Literal

from penstock.frontend.errors import Overloaded

HALVING_SECONDS = 10.0
LIGHT_SECONDS = 0.5

Cost = Literal["short", "unknown", "long"]

_MAX_ACCOUNTS = 4096  # of clients that neither hold a slot nor wait

_Line = OrderedDict[int, asyncio.Future[None]]
"""What one client waits for, by numbers in the order in which it came."""


class _Client:
    """One client's account, its slots and what it waits for."""

    __slots__ = ("heat", "lines", "name", "num_held", "version")

    def __init__(self, name: str) -> None:
        self.name = name
        self.heat = -math.inf
        """Logarithm to base 2 of the seconds used, plus the number of halvings at which that was true: comparable with
        those of others at any time."""
        self.num_held = 0
        self.lines: dict[Cost, _Line] = {}
        self.version = 0  # heap entries with older ones are outdated

    def used(self) -> float:
        """Seconds on the account now."""
        return math.exp2(self.heat - monotonic() / HALVING_SECONDS)

    def charge(self, seconds: float) -> None:
        if (used := self.used() + seconds) > 0:
            self.heat = math.log2(used) + monotonic() / HALVING_SECONDS


class Slot:
    """A slot that a client holds until it calls `leave`."""

    __slots__ = ("_began", "_client", "_cost", "_slots")

    def __init__(self, slots: "FairSlots", client: _Client, cost: Cost) -> None:
        self._slots, self._client, self._cost = slots, client, cost
        self._began = monotonic()

    def leave(self) -> None:
        """Give the slot back, and charge the time to its client."""
        self._slots._leave(self._client, self._cost, monotonic() - self._began)


_Entry = tuple[int, float, int, int, _Client]
"""Slots held, heat, number of the first in line, version, client."""


class FairSlots:
    """The slots; lives in a running event loop. The caller names clients: an API key's id, or an address."""

    def __init__(self, num_slots: int, max_waiting: int, what: str) -> None:
        """A client with nothing waiting finds room in a queue twice as long as `max_waiting`: nobody shuts it out.

        `what`: what the slots are waited for, such as "to be read"; for errors.
        """
        self._num_slots = self._num_free = num_slots
        self._num_long = 0  # slots held for long work
        self._max_waiting = max_waiting
        self._what = what
        self.num_waiting = 0
        self._numbers = count()
        self._busy: dict[str, _Client] = {}
        self._idle: OrderedDict[str, _Client] = OrderedDict()
        self._heaps: dict[Cost, list[_Entry]] = {"short": [], "unknown": [], "long": []}
        self._all_free: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def slot(self, client: str, cost: Cost = "unknown") -> AsyncIterator[None]:
        """Hold a slot.

        Raises:
            Overloaded: when entered, if too many wait already.
        """
        held = await self.enter(client, cost)
        try:
            yield
        finally:
            held.leave()

    async def enter(self, client: str, cost: Cost = "unknown") -> Slot:
        """Wait for a slot; the caller must `leave` it. Raises the same error."""
        asking = self._busy.get(client) or self._idle.pop(client, None) or _Client(client)
        if self._may_have_one(asking, cost):  # no waiting client may have it: see `_hand_out`
            self._busy[client] = asking
            self._take(asking, cost)
            return Slot(self, asking, cost)
        most = self._max_waiting * (1 if any(asking.lines.values()) else 2)
        if self.num_waiting >= most:
            self._rest(asking)
            raise Overloaded(f"{self.num_waiting} requests wait {self._what}", retry_after=1)
        self._busy[client] = asking
        number, turn = next(self._numbers), asyncio.get_running_loop().create_future()
        line = asking.lines.setdefault(cost, OrderedDict())
        line[number] = turn
        self.num_waiting += 1
        self._line_up(asking)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(asking, cost, 0.0)
            elif line.pop(number, None) is not None:
                self.num_waiting -= 1
                self._line_up(asking)
                self._rest(asking)
            raise
        return Slot(self, asking, cost)

    async def all_free(self) -> None:
        """Wait until nobody holds a slot or waits for one."""
        while self.num_waiting or self._num_free < self._num_slots:
            self._all_free = self._all_free or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._all_free)

    def _leave(self, client: _Client, cost: Cost, seconds: float) -> None:
        self._num_free += 1
        self._num_long -= cost == "long"
        client.num_held -= 1
        client.charge(seconds)
        self._line_up(client)
        self._hand_out()
        self._rest(client)

    def _rest(self, client: _Client) -> None:
        """Remember only the account of a client that neither holds nor waits, and not of too many."""
        if not client.num_held and not any(client.lines.values()):
            self._busy.pop(client.name, None)
            if client.heat > -math.inf:
                self._idle[client.name] = client
            if len(self._idle) > _MAX_ACCOUNTS:
                self._idle.popitem(last=False)
        if self._all_free is not None and not self.num_waiting and self._num_free == self._num_slots:
            self._all_free.set_result(None)
            self._all_free = None

    def _hand_out(self) -> None:
        while self._num_free and (found := self._next()) is not None:
            client, cost = found
            _, turn = client.lines[cost].popitem(last=False)
            self.num_waiting -= 1
            if not turn.cancelled():  # it has left, and is about to notice
                self._take(client, cost)
                turn.set_result(None)
            self._line_up(client)
            self._rest(client)

    def _next(self) -> tuple[_Client, Cost] | None:
        """Who gets a free slot, and for what."""
        best: _Entry | None = None
        best_cost: Cost = "short"
        for cost, heap in self._heaps.items():
            while heap and heap[0][3] != heap[0][4].version:
                heappop(heap)
            if heap and self._may_have_one(heap[0][4], cost) and (best is None or heap[0][:3] < best[:3]):
                best, best_cost = heap[0], cost
        return None if best is None else (best[4], best_cost)

    def _line_up(self, client: _Client) -> None:
        """Put a client where it belongs among those that wait, after something about it has changed."""
        client.version += 1
        for cost, line in client.lines.items():
            if not line:
                continue
            heap = self._heaps[cost]
            heappush(heap, (client.num_held, client.heat, next(iter(line)), client.version, client))
            if len(heap) > 2 * self.num_waiting + 64:
                heap[:] = [entry for entry in heap if entry[3] == entry[4].version]
                heapify(heap)

    def _take(self, client: _Client, cost: Cost) -> None:
        self._num_free -= 1
        self._num_long += cost == "long"
        client.num_held += 1

    def _may_have_one(self, client: _Client, cost: Cost) -> bool:
        if self._num_slots == 1 or not self._num_free or cost == "short":
            return bool(self._num_free)
        if cost == "long":
            return self._num_long < self._num_slots - 1
        if client.num_held >= self._num_slots - 1:
            return False
        return self._num_free > 1 or client.used() <= LIGHT_SECONDS
