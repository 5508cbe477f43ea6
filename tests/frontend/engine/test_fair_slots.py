"""Slots go to whoever has used them least, and one is left for those who ask for little."""

import asyncio

import pytest

from penstock.frontend.errors import Overloaded
from penstock.frontend.grammars.fair_slots import LIGHT_SECONDS, FairSlots


class Holder:
    """A client that holds a slot until it is told to let go."""

    def __init__(self, slots: FairSlots, client: str, entered: list[str]) -> None:
        self._done = asyncio.Event()
        self.task = asyncio.create_task(self._hold(slots, client, entered))

    async def _hold(self, slots: FairSlots, client: str, entered: list[str]) -> None:
        async with slots.slot(client):
            entered.append(client)
            await self._done.wait()

    async def let_go(self) -> None:
        self._done.set()
        await self.task
        await turn()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_client_takes_the_last_slot_while_it_has_others() -> None:
    slots, entered = FairSlots(3, 10), list[str]()
    holders = [Holder(slots, "a", entered) for _ in range(5)]
    await turn()
    assert entered == ["a", "a"]
    other = Holder(slots, "b", entered)
    await turn()
    assert entered == ["a", "a", "b"]
    await other.let_go()
    for holder in holders:
        await holder.let_go()
    assert entered == ["a", "a", "b", "a", "a", "a"]
    assert slots.num_waiting == 0


async def test_who_has_used_least_goes_first_and_heavy_ones_leave_a_slot() -> None:
    slots, entered = FairSlots(2, 10), list[str]()
    slots._charge("heavy", 10)
    slots._charge("heavier", 20)
    slots._charge("middling", LIGHT_SECONDS / 2)
    first = Holder(slots, "heavy", entered)
    await turn()
    waiting = [Holder(slots, client, entered) for client in ("heavier", "heavy")]
    await turn()
    assert entered == ["heavy"]  # the free slot is for others
    light = Holder(slots, "new", entered)
    await turn()
    assert entered == ["heavy", "new"]
    waiting += [Holder(slots, client, entered) for client in ("middling", "newer")]
    await turn()
    await first.let_go()
    assert entered[2:] == ["newer"]
    await light.let_go()
    assert entered[3:] == ["middling"]
    for holder in reversed(waiting):
        await holder.let_go()
    assert entered[4:] == ["heavy", "heavier"] or entered[4:] == ["heavier", "heavy"]


async def test_too_many_are_told_so_and_who_leaves_makes_room() -> None:
    slots, entered = FairSlots(1, 2), list[str]()
    first = Holder(slots, "a", entered)
    await turn()
    waiting = [Holder(slots, client, entered) for client in "bc"]
    await turn()
    with pytest.raises(Overloaded):
        await Holder(slots, "d", entered).task
    waiting[0].task.cancel()
    await turn()
    assert slots.num_waiting == 1
    await first.let_go()
    assert entered == ["a", "c"]
    await waiting[1].let_go()
    last = Holder(slots, "e", entered)
    await turn()
    assert entered[-1] == "e"
    await last.let_go()
