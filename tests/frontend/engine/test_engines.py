"""All engines of a frontend: who was asked is told, while engines come and go."""

import asyncio
from types import SimpleNamespace
from typing import cast

from penstock.frontend.engine.engines import Engines
from penstock.frontend.engine.link import EngineLink
from penstock.ipc.messages import ListRequests, RequestList


class FakeLink:
    """An engine that answers when it may."""

    def __init__(self, number: int, may_answer: asyncio.Event) -> None:
        self.to = SimpleNamespace(label=f"engine {number}")
        self._number, self._may_answer = number, may_answer

    async def ask(self, question: ListRequests, seconds: float) -> RequestList:
        await self._may_answer.wait()
        return RequestList(question.number, (), False, self._number, 0, 0)


async def test_requests_are_listed_under_the_engines_that_were_asked() -> None:
    """One leaves and another joins before the answers come."""
    may_answer = asyncio.Event()
    links = [FakeLink(number, may_answer) for number in range(4)]
    engines = Engines()
    engines._links = cast("list[EngineLink]", links[:3])
    listing = asyncio.create_task(engines.list_requests(ListRequests(1), 1.0))
    await asyncio.sleep(0)
    engines._links[:] = cast("list[EngineLink]", links[1:])
    may_answer.set()
    found = await listing
    assert {label: each.num_running for label, each in found.items()} == {"engine 0": 0, "engine 1": 1, "engine 2": 2}
