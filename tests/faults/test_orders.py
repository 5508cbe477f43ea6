"""Two processes stopped, continued and killed in every order (`orders.py`); by default one order of each pair."""

from pathlib import Path

import pytest

from tests.faults.orders import NUM_STREAMS, Order, busy, orders, play_all
from tests.faults.soak import IS_SOAK, only_in_soak

SMALL = (
    Order((("scheduler", "stop"), ("worker", "kill"), ("scheduler", "continue")), 0.7),
    Order((("worker", "stop"), ("frontend", "stop"), ("frontend", "continue")), 0.1),
    Order((("supervisor", "stop"), ("scheduler", "kill"), ("frontend", "kill"), ("supervisor", "continue")), 0.1),
    Order((("worker", "stop"), ("supervisor", "kill")), 0.1),
)


def test_the_orders_are_all_there() -> None:
    found = [order.actions for order in orders()]
    assert len(found) == len(set(found)) == 135
    assert {order.actions for order in SMALL if len({name for name, _ in order.actions}) == 2} <= set(found)


async def played(chosen: list[Order], folder: Path) -> None:
    async for outcome in play_all(chosen, folder):
        print(outcome)
        assert outcome.num_whole <= NUM_STREAMS


async def test_two_processes_in_some_orders(tmp_path: Path) -> None:
    await played(list(SMALL), tmp_path)


@only_in_soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("num_loops", [0, 4])
async def test_two_processes_in_all_orders(tmp_path: Path, num_loops: int) -> None:
    assert IS_SOAK
    with busy(num_loops):
        await played(sorted(orders(), key=lambda order: order.ends_server), tmp_path)
