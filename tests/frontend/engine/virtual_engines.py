"""Several engines in virtual time: real schedulers with modelled workers, real routers, real news of what is cached.

Steps take a fixed time and more for each token. Clients wait for an answer before they go on.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self, cast

import pytest
from prometheus_client import CollectorRegistry

from penstock.config import Config, SchedulerOptions
from penstock.core.scheduling.scheduler import Scheduler
from penstock.frontend.engine.book import Bill, LiveRequest
from penstock.frontend.engine.link import EngineLink, Load
from penstock.frontend.engine.router import cached_pages
from penstock.frontend.engine.router import engine as router_engine
from penstock.frontend.engine.router.router import EngineRouter
from penstock.frontend.errors import ApiError
from penstock.ipc.codec import deltas_of, pack_int32
from penstock.ipc.messages import AddRequest, CacheEvents, SamplingParams, SequenceDelta
from penstock.lab.simulation.device import StepShape, Timing
from penstock.lab.simulation.worker import ModelledWorker
from penstock.parts.routing.scheduler.changes import CacheChanges
from tests.core.driver import hello, make_limits

PAGE_SIZE = 16
STATS_SECONDS, EVENTS_SECONDS = 0.2, 0.05


class Turn(NamedTuple):
    """What a client adds to what was said before, and how many tokens the answer has."""

    tokens: list[int]
    num_output: int


Conversation = list[Turn]


class Steady:
    """A device whose steps take 2 ms, and 50 us for each token."""

    overlaps_copies: ClassVar[bool] = False
    stages: ClassVar[tuple[float, ...]] = (1.0,)

    def walk(self, seed: int) -> Self:
        return self

    def seconds(self, shape: StepShape) -> float:
        return 2e-3 + 5e-5 * (len(shape.decodes) + sum(num for _, num in shape.chunks))

    def gap(self, shape: StepShape) -> float:
        return 1e-4


class VirtualLink(SimpleNamespace):
    """What a router looks at."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class VirtualEngine:
    """A scheduler, its worker, and what a frontend's link to it knows."""

    def __init__(self, number: int, num_pages: int, num_rows: int, num_links: int) -> None:
        limits = make_limits(num_pages, PAGE_SIZE, num_rows, 512, 4096, 5000)
        options = SchedulerOptions(max_num_seqs=num_rows, max_num_batched_tokens=512, pipeline_depth=0)
        self.scheduler = Scheduler.for_worker(Config(scheduler=options), hello(limits))
        self.worker = ModelledWorker(Steady(), hello(limits), Timing(), number, None)
        self.is_planned = False
        self.num_events = 0
        self.changes = CacheChanges(self.scheduler.kv)
        self.links = [
            VirtualLink(
                facts=SimpleNamespace(), last_facts=None, stats=None, sent=Load(), takes_requests=True,
                on_cache_events=None, send=lambda message: True, to=SimpleNamespace(label=str(number)),
            )
            for _ in range(num_links)
        ]  # fmt: skip

    @property
    def num_computed(self) -> int:
        """Tokens: of prompts, without those that were cached, and of answers."""
        totals = self.scheduler.totals
        return totals.num_prompt_tokens - totals.num_cached_tokens + totals.num_output_tokens


class Client:
    """Has one conversation after the other, and is the sink of its request."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self.left = [(turn, i == 0) for conversation in conversations for i, turn in enumerate(conversation)]
        self.known: list[int] = []
        self.bill = Bill(1)

    def push(self, first_index: int, delta: SequenceDelta) -> None:
        self.known += delta.token_ids

    def fail(self, error: ApiError) -> None:
        raise error


@dataclass
class Seen:
    """What became of a load."""

    num_prompt: int = 0  # tokens
    num_cached: int = 0
    computed: list[int] = field(default_factory=list)  # tokens, by engine
    chosen: list[int] = field(default_factory=list)  # engine of each request, in order
    seconds: float = 0.0
    expected: float = 0.0
    found: float = 0.0

    @property
    def busiest_over_mean(self) -> float:
        return max(self.computed) / (sum(self.computed) / len(self.computed)) - 1


class Fleet:
    """Engines, frontends that choose among them, and clients."""

    def __init__(
        self, policy: str, monkeypatch: pytest.MonkeyPatch, *, num_engines: int = 2, num_frontends: int = 1,
        num_pages: int = 832, num_rows: int = 16, seed: int = 0,
    ) -> None:  # fmt: skip
        self.now = 0.0
        for module in (cached_pages, router_engine):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.engines = [VirtualEngine(i, num_pages, num_rows, num_frontends) for i in range(num_engines)]
        self.registry = CollectorRegistry()
        self.routers = []
        for frontend in range(num_frontends):
            registry = self.registry if not frontend else CollectorRegistry()
            router = EngineRouter(policy, SchedulerOptions(), registry, seed=seed + frontend)
            for i, engine in enumerate(self.engines):
                router.join(cast(EngineLink, engine.links[frontend]), str(i))
            self.routers.append(router)
        for engine in self.engines:
            self._tell(engine, part=0, is_last=True, page_size=PAGE_SIZE)
        self.seen = Seen()
        self._num_clients = 0
        self._owners: dict[str, tuple[VirtualEngine, LiveRequest, Client, int]] = {}
        self._rng = random.Random(seed)

    def run(self, clients: Sequence[Client], pause: float = 0.05) -> Seen:
        """Let clients come within a second, and go on until all have their answers."""
        self._pause = pause
        self._num_clients = len(clients)
        for i, client in enumerate(clients):
            frontend = i % len(self.routers)
            self._after(self._rng.random(), lambda c=client, f=frontend: self._ask(c, f))  # type: ignore[misc]
        self._after(EVENTS_SECONDS, self._tell_caches)
        self._after(STATS_SECONDS, self._tell_stats)
        while self._events and self._num_clients:
            self.now, _, event = heapq.heappop(self._events)
            event()
        assert not self._num_clients
        seen = self.seen
        seen.seconds = self.now
        seen.computed = [engine.num_computed for engine in self.engines]
        seen.num_prompt = sum(engine.scheduler.totals.num_prompt_tokens for engine in self.engines)
        seen.num_cached = sum(engine.scheduler.totals.num_cached_tokens for engine in self.engines)
        for i in range(len(self.engines)):
            for name in ("expected", "found"):
                told = self.registry.get_sample_value(f"penstock_router_{name}_tokens_total", {"engine": str(i)})
                setattr(seen, name, getattr(seen, name) + (told or 0.0))
        return seen

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def _ask(self, client: Client, frontend: int) -> None:
        turn, is_first = client.left.pop(0)
        client.known = [*([] if is_first else client.known), *turn.tokens]
        name = f"r{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=turn.num_output)
        live = LiveRequest(AddRequest(name, pack_int32(client.known), sampling), client, 0)
        router = self.routers[frontend]
        links = [cast(EngineLink, engine.links[frontend]) for engine in self.engines]
        takes = [link for link in links if link.takes_requests]
        chosen = router.choose(live, takes)
        engine = self.engines[links.index(chosen)]
        message = live.message(self.now)
        chosen.sent.add("", 1, len(client.known))
        router.sent(live, chosen)
        self.seen.chosen.append(links.index(chosen))
        assert engine.scheduler.add_request(message, b"", self.now) is None
        self._owners[name] = engine, live, client, frontend
        self._plan(engine)

    def _plan(self, engine: VirtualEngine) -> None:
        if engine.is_planned:
            return
        step = engine.scheduler.schedule(self.now)
        if step is None:
            return
        engine.is_planned = True
        at, result = engine.worker.execute(step.plan, self.now)
        self._after(at - self.now, lambda: self._returned(engine, result))

    def _returned(self, engine: VirtualEngine, result: Any) -> None:
        engine.is_planned = False
        for batch in engine.scheduler.process(result, self.now).values():
            for delta in deltas_of(batch):
                _, live, client, frontend = self._owners[delta.request_id]
                assert live.take(delta)
                live.sink.push(0, delta)
                if delta.finish_reason is not None:
                    del self._owners[delta.request_id]
                    self.routers[frontend].gone(live)
                    if client.left:
                        pause = self._rng.expovariate(1 / self._pause) if self._pause else 0.0
                        self._after(pause, lambda c=client, f=frontend: self._ask(c, f))  # type: ignore[misc]
                    else:
                        self._num_clients -= 1
        self._plan(engine)

    def _tell_caches(self) -> None:
        for engine in self.engines:
            if engine.changes.num_noted:
                engine.num_events += 1
                self._tell(engine, *engine.changes.take(1 << 20))
        self._after(EVENTS_SECONDS, self._tell_caches)

    def _tell(self, engine: VirtualEngine, *columns: Any, **fields: Any) -> None:
        for link in engine.links:
            if link.on_cache_events is not None:
                link.on_cache_events(CacheEvents(engine.num_events, *columns, **fields))

    def _tell_stats(self) -> None:
        for engine in self.engines:
            for link in engine.links:
                link.stats, link.sent = engine.scheduler.stats(), Load()
        self._after(STATS_SECONDS, self._tell_stats)
