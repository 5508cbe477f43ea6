"""Keeps a request book's links in line with the engines that Ray Serve says are running.

    new engine   its link joins the book
    gone engine  its link leaves the book, and its requests go on at other engines: at once if another one is ready, or
                 else as soon as one is. Until then it keeps them: an engine that must end waits for its requests.

Serve no longer names an engine that has died or must end, so both cases are treated alike: a dead engine sends nothing
more, and frontends move the requests of an engine that must end.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from penstock.deploy.ray.engine import EngineCard
from penstock.frontend.engine.book import RequestBook
from penstock.frontend.engine.link import EngineLink

log = structlog.get_logger()

Ask = Callable[[], Awaitable[Sequence[EngineCard]]]
"""Asks all running engines for their cards; empty if there are none, or if that is unknown."""


class Fleet:
    """The engines of one model that a frontend knows."""

    def __init__(self, ask: Ask, connect: Callable[[EngineCard], EngineLink], interval: float) -> None:
        """`connect` makes a link, which is not open yet; `interval` is the time between two checks, in seconds."""
        self._ask = ask
        self._connect = connect
        self._interval = interval
        self._links: dict[str, EngineLink] = {}  # by the names of their engines

    async def first(self) -> list[EngineLink]:
        """Wait for an engine; return the links of all known engines, for the book that `follow` gets."""
        while not (cards := await self._ask()):  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(self._interval)
        self._links = {card.name: self._connect(card) for card in cards}
        return list(self._links.values())

    async def follow(self, book: RequestBook) -> None:
        """Keep the book's links up to date, for as long as the process runs."""
        while True:
            await asyncio.sleep(self._interval)
            cards = {card.name: card for card in await self._ask()}
            for name in cards.keys() - self._links.keys():
                log.info("engine joined", engine=name)
                self._links[name] = self._connect(cards[name])
                book.join(self._links[name])
            await self._let_go(book, cards)

    async def _let_go(self, book: RequestBook, there: Mapping[str, EngineCard]) -> None:
        for name in self._links.keys() - there.keys():
            others = [link for other, link in self._links.items() if other in there]
            if any(link.facts is not None for link in others):
                log.info("engine left", engine=name)
                with suppress(ValueError):
                    await book.leave(self._links.pop(name))
