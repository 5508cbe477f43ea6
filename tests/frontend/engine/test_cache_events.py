"""News of an engine's cache over real sockets, with a real cache behind them: messages are lost, connections break."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from penstock.config import Config, IpcOptions, SchedulerOptions
from penstock.core.engine.frontends import Frontends, Order
from penstock.core.kv.content_keys import node_key
from penstock.frontend.engine.book import RequestBook
from penstock.frontend.engine.connection import Channel, EngineAddress, over_sockets
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.engine.router import cached_pages
from penstock.frontend.engine.router.cached_pages import CachedPages
from penstock.frontend.engine.router.router import EngineRouter
from penstock.ipc.channel import PeerId
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    CacheEvents,
    EngineNotReady,
    EngineReady,
    FrontendHello,
    ListCache,
    Message,
    ToFrontend,
)
from penstock.parts.routing.scheduler import news as cache_news
from penstock.parts.routing.scheduler.news import CacheNews
from tests.core.driver import Driver, make_limits, make_request


class CachingEngine:
    """An engine's side of the socket, and a scheduler whose pages come and go."""

    def __init__(self, address: str, seed: int) -> None:
        self.rng = Random(seed)
        self.driver = Driver(make_limits(60, 4, num_host_pages=30))
        self.numbers = iter(range(10**6))
        self.families = [[self.rng.randrange(900) for _ in range(40)] for _ in range(6)]
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        config = Config(ipc=IpcOptions(frontend_address=address, heartbeat_timeout=1.0))
        self.frontends = Frontends(self.context, config, None, self)
        self.news = CacheNews(self.frontends.channel)
        self.news.follow(self.driver.scheduler.kv, self.driver.scheduler.limits)
        self.num_asked = 0

    def why_not(self, protocol_version: int, model_fingerprint: str) -> str:
        return ""

    def readiness(self) -> EngineReady | EngineNotReady:
        return EngineReady(PROTOCOL_VERSION, "0" * 16, 128, 1000, 4, 60, 8)

    def on_frontend(self, peer: PeerId, hello: FrontendHello) -> None:
        assert hello.wants_cache_events
        self.news.add(peer)

    def on_order(self, peer: PeerId, order: Order | Message) -> None:
        assert isinstance(order, ListCache)
        self.num_asked += 1
        self.news.tell_all_of_it(peer)

    def on_frontend_gone(self, peer: PeerId) -> int:
        self.news.remove(peer)
        return 0

    def work(self) -> None:
        """Something comes to the cache, and something goes."""
        prompt = self.rng.choice(self.families)[: self.rng.randint(4, 40)]
        self.driver.add(make_request(f"r{next(self.numbers)}", [*prompt, self.rng.randrange(900)], 2))
        for _ in range(4):
            self.driver.step()
        self.news.changed()

    @property
    def known(self) -> dict[int, int]:
        kv = self.driver.scheduler.kv
        assert kv.cache is not None
        assert kv.tiers is not None
        tiers = {node_key(node) for node in kv.cache.nodes() if node.parent is not None}, set(kv.tiers.host.keys())
        device, host = ({int.from_bytes(key[:8], "little") for key in tier} for tier in tiers)
        return {key: (key in device) + 2 * (key in host) for key in device | host}

    def close(self) -> None:
        self.news.close()
        self.frontends.channel.close()
        self.context.term()


class Losing:
    """Connections on which some messages about caches get lost."""

    def __init__(self, context: zmq.Context[Any], rng: Random) -> None:
        self._connect = over_sockets(context)
        self._rng = rng
        self.share = 0.0
        self.num_lost = 0

    def __call__(
        self, to: EngineAddress, on_message: Callable[[ToFrontend], None], on_broken: Callable[[], None]
    ) -> Channel:
        def take(message: ToFrontend) -> None:
            if isinstance(message, CacheEvents) and self._rng.random() < self.share:
                self.num_lost += 1
            else:
                on_message(message)

        return self._connect(to, take, on_broken)


class Side:
    """A frontend with two engines."""

    def __init__(self, name: str, addresses: list[str], context: zmq.Context[Any], seed: int) -> None:
        self.connect = Losing(context, Random(seed))
        self.registry = CollectorRegistry()
        self.router = EngineRouter("prefix", SchedulerOptions(), self.registry, seed)
        links = [EngineLink(EngineAddress(each, name, "0" * 16, 0.1, 1.0), self.connect, print) for each in addresses]
        self.book = RequestBook(links, SchedulerOptions(), self.router)

    @property
    def caches(self) -> list[CachedPages]:
        return [engine.cached for engine in self.router.engines]


class Fleet:
    """Two engines and two frontends."""

    def __init__(self, sockets: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.addresses = [f"ipc://{sockets}/engine-{i}.sock" for i in range(2)]
        self.engines = [CachingEngine(address, i) for i, address in enumerate(self.addresses)]
        self.sides = [Side(f"frontend-{i}", self.addresses, self.context, i) for i in range(2)]

    async def agree(self, seconds: float = 5.0) -> None:
        """Wait until every frontend knows what there is, and nothing else."""
        async with asyncio.timeout(seconds):
            while True:
                for engine in self.engines:
                    engine.work()
                await asyncio.sleep(0.1)
                known = [engine.known for engine in self.engines]
                if all([each.known() for each in side.caches] == known for side in self.sides):
                    return

    async def close(self) -> None:
        for side in self.sides:
            await side.book.close()
        for engine in self.engines:
            engine.close()
        self.context.term()


@pytest.fixture
async def fleet(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    for name, value in {"INTERVAL": 0.005, "MORE_SECONDS": 0.001, "PART_SECONDS": 0.001, "PART_PAGES": 7}.items():
        monkeypatch.setattr(cache_news, name, value)
    monkeypatch.setattr(cached_pages, "_ASK_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(cached_pages, "_PART_SECONDS", 0.2)
    fleet = Fleet(sockets)
    yield fleet
    await fleet.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what is told."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)


async def test_lost_messages_are_missed_and_made_up_for(fleet: Fleet) -> None:
    await fleet.agree()
    for side in fleet.sides:
        side.connect.share = 0.2
    for _ in range(40):
        for engine in fleet.engines:
            engine.work()
        await asyncio.sleep(0.01)
    for side in fleet.sides:
        side.connect.share = 0.0
        assert side.connect.num_lost
    await fleet.agree()
    gaps = [side.registry.get_sample_value("penstock_router_event_gaps_total", {"engine": "0"}) for side in fleet.sides]
    assert any(gaps)
    assert all(engine.num_asked for engine in fleet.engines)
    assert all(engine.known for engine in fleet.engines)


async def test_a_restarted_engine_and_an_empty_cache_are_told(fleet: Fleet) -> None:
    await fleet.agree()
    first = fleet.engines[0]
    first.driver.scheduler.reset_prefix_cache()
    first.news.changed()
    known = first.known
    await until(lambda: [side.caches[0].known() for side in fleet.sides] == [known, known])
    first.driver.reset_worker()
    first.news.follow(first.driver.scheduler.kv, first.driver.scheduler.limits)
    await until(lambda: [side.caches[0].known() for side in fleet.sides] == [{}, {}])
    for _ in range(5):
        fleet.engines[1].work()
    await fleet.agree()
    first.close()
    fleet.engines[0] = CachingEngine(fleet.addresses[0], 7)  # knows nobody: frontends say hello again
    await fleet.agree()
    assert fleet.engines[0].known
