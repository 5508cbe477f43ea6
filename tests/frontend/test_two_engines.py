"""A book of live requests over two links: what one engine loses, the other one goes on with."""

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import zmq

from penstock.core.config import SchedulerOptions
from penstock.frontend.engine.book import RequestBook, first_ready
from penstock.frontend.engine.link import EngineAddress, EngineLink, over_sockets
from penstock.frontend.errors import ApiError
from penstock.frontend.exchange.metrics import Metrics
from penstock.ipc.messages import AddRequest, SamplingParams, SequenceDelta
from tests.frontend.fake_scheduler import FakeScheduler, Script

TOKENS = list(range(5, 35))


class Sink:
    """A reader of one request."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.error: ApiError | None = None

    def push(self, first_index: int, delta: SequenceDelta) -> None:
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason

    def fail(self, error: ApiError) -> None:
        self.error = error


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that a scheduler brings about."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.005)


class Pair:
    """Two engines, links to both, and a book that chooses among them."""

    def __init__(self, sockets: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.engines = [FakeScheduler(f"ipc://{sockets}/engine-{i}.sock", vocab_size=100) for i in range(2)]
        for engine in self.engines:
            engine.script = lambda request, i: Script(TOKENS, delay=0.01)
        self.links = [
            EngineLink(
                EngineAddress(each.address, "frontend-0", "0" * 16, 0.1, 0.5),
                SchedulerOptions(),
                over_sockets(self.context),
                print,
            )
            for each in self.engines
        ]
        self.book = RequestBook(self.links, self.choose)

    def choose(self, links: Sequence[EngineLink]) -> EngineLink | None:
        """Of those that are ready the one that has the fewest requests."""
        at = Counter(id(live.link) for live in self.book._live.values())
        return min((link for link in links if link.facts is not None), key=lambda link: at[id(link)], default=None)

    def submit(self, name: str) -> Sink:
        sink = Sink()
        sampling = SamplingParams(max_tokens=100, stop_token_ids=(2,))
        self.book.submit(AddRequest(name, struct.pack("<2i", 3, 4), sampling), sink)
        return sink

    async def close(self) -> None:
        await self.book.close()
        for engine in self.engines:
            engine.close()
        self.context.term()


@pytest.fixture
async def pair(sockets: Path) -> AsyncIterator[Pair]:
    pair = Pair(sockets)
    await until(lambda: all(link.facts is not None for link in pair.links))
    yield pair
    await pair.close()


def check(*sinks: Sink) -> None:
    """Each has had all tokens once, in order."""
    for sink in sinks:
        assert (sink.token_ids, sink.finish_reason, sink.error) == ([*TOKENS, 2], "stop", None)


async def test_a_request_moves_to_the_other_engine_when_its_own_dies(pair: Pair) -> None:
    first, second = pair.engines
    sinks = [pair.submit(f"request-{i}") for i in range(4)]
    await until(lambda: all(len(sink.token_ids) >= 3 for sink in sinks))
    assert [len(first.added), len(second.added)] == [2, 2]
    first.is_silent = True  # and what it was doing is never told
    first.forget_peers()
    await until(lambda: all(sink.finish_reason for sink in sinks))
    check(*sinks)
    moved = second.added[2:]
    assert {request.request_id for request in moved} == {"request-0#1", "request-2#1"}
    assert all(len(request.progress[0].token_ids) >= 3 * 4 for request in moved)
    assert pair.book.ready.is_set()
    assert pair.book.silent_seconds == 0.0
    assert pair.book.num_live == 0


async def test_new_requests_go_to_the_engine_that_is_ready(pair: Pair) -> None:
    first, second = pair.engines
    first.set_ready(False)
    await until(lambda: pair.links[0].facts is None)
    assert first_ready(pair.links) is pair.links[1]
    assert pair.book.link is pair.links[1]
    sinks = [pair.submit(f"request-{i}") for i in range(3)]
    await until(lambda: all(sink.finish_reason for sink in sinks))
    check(*sinks)
    assert not first.added
    assert len(second.added) == 3


async def test_an_engine_that_was_restarted_gets_only_what_is_its_own(pair: Pair) -> None:
    """It says that it does not know us: its requests move, those of the other engine stay where they are."""
    first, second = pair.engines
    sinks = [pair.submit(f"request-{i}") for i in range(2)]
    await until(lambda: all(len(sink.token_ids) >= 3 for sink in sinks))
    first.forget_peers()
    await until(lambda: all(sink.finish_reason for sink in sinks))
    check(*sinks)
    assert [len(request.progress) for engine in pair.engines for request in engine.added].count(1) == 1
    assert second.added[0].request_id == "request-1"


async def test_metrics_of_several_engines_have_a_label(pair: Pair) -> None:
    metrics = Metrics(lambda: pair.book.all_stats)
    for num_running, engine in zip((3, 5), pair.engines, strict=True):
        engine.tell(engine.stats(num_running=num_running))
    await until(lambda: len(pair.book.all_stats) == 2)
    told = metrics.exposition().decode().splitlines()
    assert 'penstock_num_requests_running{engine="0"} 3.0' in told
    assert 'penstock_num_requests_running{engine="1"} 5.0' in told
    assert sum(line.startswith("# TYPE penstock_num_requests_running ") for line in told) == 1
    assert any(line.startswith('penstock_engine_dropped_messages_total{engine="1",socket="workers"}') for line in told)
