"""Slots go to whoever has used them least, and one is left for those who ask for little."""

import asyncio
import heapq
from typing import Any

import pytest

from penstock.frontend.errors import Overloaded
from penstock.frontend.text import fair_slots
from penstock.frontend.text.fair_slots import LIGHT_SECONDS, Cost, FairSlots


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def use(self, slots: FairSlots, client: str, seconds: float) -> None:
        """Hold a slot for so long."""
        async with slots.slot(client, "short"):
            self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fair_slots, "monotonic", clock)
    return clock


class Holder:
    """A client that holds a slot until it is told to let go."""

    def __init__(self, slots: FairSlots, client: str, entered: list[str], cost: Cost = "unknown") -> None:
        self._done = asyncio.Event()
        self.task = asyncio.create_task(self._hold(slots, client, entered, cost))

    async def _hold(self, slots: FairSlots, client: str, entered: list[str], cost: Cost) -> None:
        async with slots.slot(client, cost):
            entered.append(client)
            await self._done.wait()

    async def let_go(self) -> None:
        self._done.set()
        await self.task
        await turn()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_client_takes_the_last_slot_while_it_has_others(clock: Clock) -> None:
    slots, entered = FairSlots(3, 10, "here"), list[str]()
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


async def test_who_has_used_least_goes_first_and_heavy_ones_leave_a_slot(clock: Clock) -> None:
    slots, entered = FairSlots(2, 10, "here"), list[str]()
    await clock.use(slots, "heavy", 10)
    await clock.use(slots, "heavier", 20)
    await clock.use(slots, "middling", LIGHT_SECONDS / 2)
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
    slots, entered = FairSlots(1, 2, "here"), list[str]()
    first = Holder(slots, "a", entered)
    await turn()
    waiting = [Holder(slots, client, entered) for client in "bc"]
    await turn()
    with pytest.raises(Overloaded, match="2 requests wait here"):
        await Holder(slots, "b", entered).task
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


async def test_short_work_waits_for_other_short_work_only(clock: Clock) -> None:
    slots, entered = FairSlots(2, 100, "here"), list[str]()
    long = [Holder(slots, client, entered, "long") for client in "abab"]
    await turn()
    assert entered == ["a"]
    short = [Holder(slots, client, entered, "short") for client in ("a", "honest")]
    await turn()
    assert entered == ["a", "a"]
    await short[0].let_go()
    assert entered == ["a", "a", "honest"]
    await short[1].let_go()
    assert len(entered) == 3, "the other long ones wait although a slot is free"
    await long[0].let_go()
    assert entered[3:] == ["b"]
    for holder in (long[1], long[2], long[3]):
        await holder.let_go()
    assert entered[3:] == ["b", "a", "b"]
    await slots.all_free()


async def test_clients_take_turns_by_the_time_that_they_used(clock: Clock) -> None:
    slots, entered = FairSlots(1, 1000, "here"), list[str]()
    first = Holder(slots, "x", entered)
    await turn()
    costly = [Holder(slots, "costly", entered) for _ in range(4)]
    cheap = [Holder(slots, "cheap", entered) for _ in range(20)]
    await first.let_go()
    while costly or cheap:
        now = costly if entered[-1] == "costly" else cheap
        clock.now += 1.0 if now is costly else 0.2
        await now.pop(0).let_go()
    assert entered[1:9].count("costly") == 2
    assert "costly" not in entered[-3:]


async def test_a_client_with_nothing_waiting_finds_room(clock: Clock) -> None:
    slots, entered = FairSlots(1, 3, "here"), list[str]()
    holders = [Holder(slots, "greedy", entered) for _ in range(4)]
    await turn()
    others = [Holder(slots, client, entered) for client in "abc"]
    await turn()
    for client in ("greedy", "a", "d"):
        with pytest.raises(Overloaded):
            await Holder(slots, client, entered).task
    for holder in (holders[0], *others, *holders[1:]):
        clock.now += 0.1
        await holder.let_go()
    assert entered == ["greedy", "a", "b", "c", "greedy", "greedy", "greedy"]


async def test_who_leaves_as_its_turn_comes_keeps_no_slot() -> None:
    slots, entered = FairSlots(1, 10, "here"), list[str]()
    first = Holder(slots, "a", entered)
    await turn()
    second, third = Holder(slots, "b", entered), Holder(slots, "c", entered)
    await turn()
    second.task.cancel()  # and in the same turn of the loop the slot comes free
    await first.let_go()
    assert entered == ["a", "c"]
    fourth = Holder(slots, "d", entered)
    await turn()
    third._done.set()
    await third.task
    fourth.task.cancel()  # it was given the slot, but does not know yet
    await turn()
    await slots.all_free()
    last = Holder(slots, "e", entered)
    await turn()
    assert entered[-1] == "e"
    await last.let_go()


async def test_a_thousand_clients_cost_no_more_than_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = 0
    push = heapq.heappush

    def counted(*arguments: Any) -> None:
        nonlocal pushed
        pushed += 1
        push(*arguments)

    monkeypatch.setattr(fair_slots, "heappush", counted)
    slots, entered = FairSlots(2, 1000, "here"), list[str]()
    holders = [Holder(slots, str(i % 1000), entered) for i in range(3000)]
    for holder in holders:
        holder._done.set()
    await asyncio.gather(*(holder.task for holder in holders))
    assert len(entered) == 3000
    assert pushed <= 4 * 3000
    assert not slots._busy
    assert not any(slots._heaps.values()) or all(len(heap) < 100 for heap in slots._heaps.values())
