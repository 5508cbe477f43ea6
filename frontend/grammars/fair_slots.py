"""A few slots shared by many clients: the client that has used them least goes first, and none can take them all.

    client asks ──▶ a slot is free and it may have it ──▶ it holds the slot; the seconds are added to its account
                 └▶ it waits; a free slot goes to the waiting client that holds the fewest, then to the lowest account

Accounts are halved every `HALVING_SECONDS`, so a client that pauses for a while starts afresh. A client whose account
is above `LIGHT_SECONDS` never gets the last free slot: that one is reserved for clients with little use.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import NamedTuple

from penstock.frontend.errors import Overloaded

HALVING_SECONDS = 10.0
LIGHT_SECONDS = 0.5

_MAX_ACCOUNTS = 1024


class _Waiting(NamedTuple):
    client: str
    turn: asyncio.Future[None]


class FairSlots:
    """The slots; lives in a running event loop. The caller names clients: an API key's id, or an address."""

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self._num_free = num_slots
        self._num_slots = num_slots
        self._max_waiting = max_waiting
        self._waiting: list[_Waiting] = []
        self._num_held: dict[str, int] = {}
        self._accounts: dict[str, tuple[float, float]] = {}  # seconds used, and when this was recorded

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Hold a slot.

        Raises:
            Overloaded: when entered, if too many clients wait already.
        """
        await self._enter(client)
        began = monotonic()
        try:
            yield
        finally:
            self._charge(client, monotonic() - began)
            self._leave(client)

    async def _enter(self, client: str) -> None:
        if self._may_have_one(client):  # no waiting client may have it: see `_hand_out`
            self._take(client)
            return
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests wait for a grammar to be parsed", retry_after=1)
        waiting = _Waiting(client, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled():
                self._leave(client)
            else:
                self._waiting.remove(waiting)
            raise

    def _leave(self, client: str) -> None:
        self._num_free += 1
        self._num_held[client] -= 1
        if not self._num_held[client]:
            del self._num_held[client]
        self._hand_out()

    def _hand_out(self) -> None:
        while self._num_free and self._waiting:
            clients = dict.fromkeys(waiting.client for waiting in self._waiting)
            able = [client for client in clients if self._may_have_one(client)]
            if not able:
                return
            next_client = min(able, key=lambda client: (self._num_held.get(client, 0), self._used(client)))
            first = next(waiting for waiting in self._waiting if waiting.client == next_client)
            self._waiting.remove(first)
            self._take(first.client)
            first.turn.set_result(None)

    def _take(self, client: str) -> None:
        self._num_free -= 1
        self._num_held[client] = self._num_held.get(client, 0) + 1

    def _may_have_one(self, client: str) -> bool:
        if self._num_slots == 1 or not self._num_free:
            return bool(self._num_free)
        if self._num_held.get(client, 0) >= self._num_slots - 1:
            return False
        return self._num_free > 1 or self._used(client) <= LIGHT_SECONDS

    def _used(self, client: str) -> float:
        seconds, at = self._accounts.get(client, (0.0, 0.0))
        return seconds * math.exp2((at - monotonic()) / HALVING_SECONDS)

    def _charge(self, client: str, seconds: float) -> None:
        self._accounts[client] = (self._used(client) + seconds, monotonic())
        if len(self._accounts) > _MAX_ACCOUNTS:
            least = min(self._accounts, key=self._used)
            del self._accounts[least]
