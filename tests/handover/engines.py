"""Engines with roles as real processes, and a frontend's book of requests over them."""

import asyncio
from argparse import Namespace
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import zmq
from prometheus_client import CollectorRegistry

from penstock.config import Config
from penstock.config.addresses import with_addresses
from penstock.config.flags import config_from
from penstock.core.launch.supervisor import Supervisor
from penstock.frontend.engine.book import Bill, RequestBook
from penstock.frontend.engine.connection import EngineAddress, over_sockets
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.engine.router.router import EngineRouter
from penstock.frontend.errors import ApiError
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import AddRequest, EngineStats, HandoverStats, SamplingParams, SequenceDelta, SetRole
from penstock.models.files.source import fingerprint
from penstock.models.finding.registry import open_model

START_SECONDS = 200.0
_names = count()


class Sink:
    """A reader of one request."""

    def __init__(self, num_sequences: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        self.ends: list[str] = [""] * num_sequences
        self.num_cached = 0
        self.prompt_logprobs = array("f")
        self.error: ApiError | None = None
        self.bill = Bill(num_sequences)
        self.changed = asyncio.Event()

    def push(self, first_index: int, delta: SequenceDelta) -> None:
        self.tokens[delta.sequence_idx] += delta.token_ids
        self.num_cached = max(self.num_cached, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs.frombytes(delta.prompt_logprobs.logprobs)
        if delta.finish_reason is not None:
            self.ends[delta.sequence_idx] = delta.error or delta.finish_reason
        self.changed.set()

    def fail(self, error: ApiError) -> None:
        self.error = error
        self.ends = [str(error)] * len(self.ends)
        self.changed.set()

    async def until(self, num_tokens: int) -> None:
        """Wait until the first sequence has so many tokens, or all have ended."""
        while len(self.tokens[0]) < num_tokens and not all(self.ends):
            self.changed.clear()
            await self.changed.wait()

    async def result(self, seconds: float = 60.0) -> list[list[int]]:
        """Wait for the end; return the tokens of each sequence."""
        async with asyncio.timeout(seconds):
            while not all(self.ends):
                self.changed.clear()
                await self.changed.wait()
        assert set(self.ends) <= {"length", "stop"}, self.ends
        return self.tokens


class Engine:
    """One engine: its processes, and the link to it."""

    def __init__(self, config: Config, link: EngineLink) -> None:
        self.config = config
        self.supervisor = Supervisor(config, config.parallel.num_ranks, has_frontends=False)
        self.running = asyncio.create_task(self.supervisor.run())
        self.link = link

    @property
    def stats(self) -> EngineStats:
        assert self.link.stats is not None
        return self.link.stats

    @property
    def handover(self) -> HandoverStats:
        assert self.stats.handover is not None
        return self.stats.handover

    def pid(self, name: str) -> int:
        """Of the scheduler, or of worker 0."""
        child = self.supervisor.engines[0].children[name == "worker"]
        assert child.process is not None
        return child.process.pid

    def kill(self, name: str) -> None:
        """End a process at once."""
        psutil.Process(self.pid(name)).kill()


class Engines:
    """All engines, and a book over their links."""

    def __init__(self, engines: Sequence[Engine], context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.engines = engines
        self.context = context
        limits = engines[0].config.scheduler
        router = EngineRouter("least-loaded", limits, CollectorRegistry(), seed=1)
        self.book = RequestBook([engine.link for engine in engines], limits, router)

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, n: int = 1, salt: str = "") -> Sink:
        """Send a request."""
        sink = Sink(n)
        self.book.submit(AddRequest(f"request-{next(_names)}", pack_int32(prompt), sampling, n, cache_salt=salt), sink)
        return sink

    async def run(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, n: int = 1
    ) -> list[list[list[int]]]:
        """All at once, to their ends."""
        sinks = [self.submit(prompt, sampling, n) for prompt in prompts]
        return [await sink.result() for sink in sinks]

    async def ready(self, *engines: Engine) -> None:
        """Wait until these (default: all) are ready."""
        async with asyncio.timeout(START_SECONDS):
            while not all(engine.link.facts is not None for engine in engines or self.engines):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def set_role(self, engine: Engine, role: Any) -> None:
        """Change what an engine does, and wait until it says so."""
        engine.link.send(SetRole(role))
        async with asyncio.timeout(60):
            while engine.link.facts is None or engine.link.facts.role != role:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.01)

    async def settled(self, seconds: float = 60.0) -> None:
        """Wait until no engine holds a page for anybody: each is free, or only cached."""
        async with asyncio.timeout(seconds):
            while True:
                await asyncio.sleep(0.25)  # counters are told at most every 0.2 seconds
                told = [engine.link.stats for engine in self.engines]
                if all(stats is not None and _is_quiet(stats) for stats in told):
                    return

    async def close(self) -> None:
        """End all processes."""
        await self.book.close()
        for engine in self.engines:
            engine.supervisor.stop()
        for engine in self.engines:
            await engine.running
        self.context.term()


def _is_quiet(stats: EngineStats) -> bool:
    handover = stats.handover
    return (
        not stats.num_running
        and not stats.num_waiting
        and stats.num_used_pages == 0
        and stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        and (handover is None or not (handover.num_waiting or handover.num_kept_pages))
    )


@asynccontextmanager
async def serving(
    model: Path, sockets: Path, *roles: str, each: Sequence[dict[str, Any]] = (), **options: Any
) -> AsyncIterator[Engines]:
    """Engines with these roles, ready. `each`: options of one of them; else they are small, and compute in fp32."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    common = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_pages": 256, "page_size": 16}
    common |= {"max_num_seqs": 16, "max_num_batched_tokens": 64, "min_prefill_tokens": 32, "spare_worker": False}
    common |= {"max_heartbeat_interval": 0.2, "heartbeat_timeout": 5.0, "log_level": "warning"}
    found = []
    for number, role in enumerate(roles):
        folder = sockets / str(number)
        folder.mkdir()
        own = dict(each[number]) if each else {}
        chosen = {"model": str(model)} | common | options | own | ({"role": [role]} if role else {})
        config = config_from(Namespace(**chosen), {})
        config = with_addresses(config, folder)
        address = EngineAddress(config.ipc.frontend_address, "frontend-0", fingerprint(open_model(config)), 0.2, 5.0)
        found.append(Engine(config, EngineLink(address, over_sockets(context), print)))
    engines = Engines(found, context)
    try:
        await engines.ready()
        await engines.settled()  # now all have told their counters
        yield engines
    finally:
        await engines.close()
