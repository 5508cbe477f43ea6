"""A book of live requests over two links: what one engine loses, the other one goes on with."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from penstock.config import SchedulerOptions
from penstock.frontend.engine.book import Bill, RequestBook
from penstock.frontend.engine.connection import EngineAddress, over_sockets
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.engine.router.router import EngineRouter
from penstock.frontend.errors import ApiError, Overloaded
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
        self.bill = Bill(1)

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

    def __init__(self, sockets: Path, heartbeat_timeout: float) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.engines = [FakeScheduler(f"ipc://{sockets}/engine-{i}.sock", vocab_size=100) for i in range(2)]
        for engine in self.engines:
            engine.script = lambda request, i: Script(TOKENS, delay=0.01)
        self.links = [
            EngineLink(
                EngineAddress(each.address, "frontend-0", "0" * 16, 0.1, heartbeat_timeout, label=str(number)),
                over_sockets(self.context),
                print,
            )
            for number, each in enumerate(self.engines)
        ]
        self.router = EngineRouter("least-loaded", SchedulerOptions(), CollectorRegistry(), seed=1)
        self.book = RequestBook(self.links, SchedulerOptions(), self.router)

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
async def pair(sockets: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    pair = Pair(sockets, getattr(request, "param", 0.5))
    await until(lambda: all(link.facts is not None for link in pair.links))
    yield pair
    await pair.close()


never_silent = pytest.mark.parametrize("pair", [60.0], indirect=True, ids=[""])
"""For a test of what engines tell: a busy machine must not make one seem lost."""


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
    assert {sink.bill.engine for sink in sinks} == {"1"}
    moved = second.added[2:]
    assert {request.request_id for request in moved} == {f"{request.request_id}#1" for request in first.added}
    assert all(len(request.progress[0].token_ids) >= 3 * 4 for request in moved)
    assert pair.book.ready.is_set()
    assert pair.book.silent_seconds == 0.0
    assert pair.book.num_live == 0


@never_silent
async def test_a_scheduler_that_ends_is_noticed_at_once(pair: Pair) -> None:
    """Long before it would be missed: `until` waits for a few seconds."""
    first, second = pair.engines
    sinks = [pair.submit(f"request-{i}") for i in range(4)]
    await until(lambda: all(len(sink.token_ids) >= 3 for sink in sinks))
    first.close()
    await until(lambda: len(second.added) == 4)  # for a small part of the heartbeat timeout
    await until(lambda: all(sink.finish_reason for sink in sinks))
    check(*sinks)


async def test_new_requests_go_to_the_engine_that_is_ready(pair: Pair) -> None:
    first, second = pair.engines
    first.set_ready(False)
    await until(lambda: pair.links[0].facts is None)
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


@never_silent
async def test_what_a_lost_engine_was_sent_and_had_told_does_not_count_when_it_is_back(pair: Pair) -> None:
    first, second = pair.engines
    gate, [link, other] = pair.book.queue, pair.links
    most = SchedulerOptions().max_num_queued_seqs
    first.tell(first.stats(num_rows=8, num_running=8, num_waiting=most))
    second.tell(second.stats(num_rows=8, num_running=8, num_waiting=most))
    await until(lambda: link.stats and other.stats)
    first.script = lambda request, i: Script(hangs=True)
    sinks = [pair.submit(f"request-{i}") for i in range(4)]
    assert link.sent.num_seqs > 0
    with pytest.raises(Overloaded):
        gate.check()
    first.forget_peers()
    await until(lambda: all(sink.finish_reason for sink in sinks))
    check(*sinks)
    await until(lambda: link.takes_requests)
    assert link.stats is None
    assert (link.sent.num_seqs, link.sent.num_ended, link.sent.requests) == (0, 0, [])
    gate.check()  # it may have room
    first.tell(first.stats(num_rows=8, num_running=7))
    await until(lambda: link.stats)
    gate.check(most + 1 - other.sent.num_seqs + other.sent.num_ended)


@never_silent
async def test_a_free_prefill_engine_is_no_room_in_the_queue_of_one_that_decodes(pair: Pair) -> None:
    for engine, link, role in zip(pair.engines, pair.links, ("prefill", "decode"), strict=True):
        assert link.facts is not None
        engine.tell(replace(link.facts, role=role))
    most = SchedulerOptions().max_num_queued_seqs
    prefill, decode = pair.engines
    prefill.tell(prefill.stats(num_rows=8))
    decode.tell(decode.stats(num_rows=8, num_running=8, num_waiting=most))
    await until(lambda: all(link.stats for link in pair.links))
    with pytest.raises(Overloaded, match=f"the limit is {most}"):
        pair.book.queue.check()


async def test_an_idle_engine_that_takes_over_is_not_stuck(pair: Pair) -> None:
    """It has computed nothing because it had nothing to do."""
    busy, idle = hung(pair)
    await asyncio.sleep(0.6)
    began = time.monotonic()
    busy.set_ready(False)
    await until(lambda: idle.added)
    assert pair.book.stuck_seconds <= time.monotonic() - began


async def test_an_idle_engine_that_drains_is_not_stuck_by_what_waits_for_others(pair: Pair) -> None:
    busy, idle = hung(pair)
    idle_link = pair.links[pair.engines.index(idle)]
    assert idle_link.facts is not None
    idle.tell(replace(idle_link.facts, is_draining=True))
    await until(lambda: idle_link.is_draining)
    busy.is_silent = True
    busy.forget_peers()
    await until(lambda: not pair.links[pair.engines.index(busy)].takes_requests)
    assert pair.book.num_live == 1
    assert pair.book.stuck_seconds == 0.0


def hung(pair: Pair) -> tuple[FakeScheduler, FakeScheduler]:
    """Submit a request that never ends. Return the engine that has it, and the other one."""
    for engine in pair.engines:
        engine.script = lambda request, i: Script(hangs=True)
    pair.submit("request")
    links = sorted(pair.links, key=pair.book.is_waiting_for, reverse=True)
    busy, idle = (pair.engines[pair.links.index(link)] for link in links)
    return busy, idle


async def test_engines_come_and_go(pair: Pair) -> None:
    first, second = pair.engines
    sinks = [pair.submit(f"request-{i}") for i in range(4)]
    await until(lambda: all(len(sink.token_ids) >= 3 for sink in sinks))
    await pair.book.leave(pair.links[0])
    await until(lambda: first.num_running == 0)  # it was told goodbye
    assert len(second.added) == 4
    first.received.clear()
    to = EngineAddress(first.address, "frontend-0b", "0" * 16, 0.1, 0.5, label="again")
    again = EngineLink(to, over_sockets(pair.context), print)
    pair.book.join(again)
    await until(lambda: again.facts is not None)
    later = pair.submit("later")
    await pair.book.leave(pair.links[1])
    with pytest.raises(ValueError, match="last"):
        await pair.book.leave(again)
    await until(lambda: all(sink.finish_reason for sink in [*sinks, later]))
    check(*sinks, later)
    assert any(request.request_id.startswith("later") for request in first.added)
    first.tell(first.stats())
    await until(lambda: pair.book.all_stats)
    assert list(pair.book.all_stats) == ["again"]


async def test_who_leaves_before_another_is_ready_loses_nothing(pair: Pair) -> None:
    second = pair.engines[1]
    second.set_ready(False)
    await until(lambda: pair.links[1].facts is None)
    sink = pair.submit("request")
    await until(lambda: len(sink.token_ids) >= 3)
    await pair.book.leave(pair.links[0])
    assert not pair.book.ready.is_set()
    second.set_ready(True)
    await until(lambda: sink.finish_reason)
    check(sink)


async def test_a_request_that_one_queue_does_not_take_goes_to_the_other(pair: Pair) -> None:
    first, second = pair.engines
    full = Script([], error="the queue is full", error_code="queue_full")
    first.script = lambda request, i: full
    sinks = [pair.submit(f"request-{i}") for i in range(6)]
    await until(lambda: all(sink.finish_reason for sink in sinks))
    check(*sinks)
    assert 0 < len(first.added) < 6
    assert len(second.added) == 6
    second.script = lambda request, i: full
    last = pair.submit("request-6")
    await until(lambda: last.finish_reason)
    assert last.finish_reason == "error", "nobody takes it: it is offered to each once"
    assert len(first.added) + len(second.added) <= 6 + 6 + 2
    assert not pair.router._routed
    assert pair.book.num_live == 0


async def test_metrics_of_several_engines_have_a_label(pair: Pair) -> None:
    metrics = Metrics(lambda: pair.book.all_stats)
    for num_running, engine in zip((3, 5), pair.engines, strict=True):
        engine.tell(engine.stats(num_running=num_running))
    await until(lambda: len(pair.book.all_stats) == 2)
    told = metrics.exposition().decode().splitlines()
    assert 'penstock_num_requests_running{engine="0"} 3.0' in told
    assert 'penstock_num_requests_running{engine="1"} 5.0' in told
    assert sum(line.startswith("# TYPE penstock_num_requests_running ") for line in told) == 1
    pair.engines[0].forget_peers()
    await until(lambda: len(pair.book.all_stats) == 1)
    told = metrics.exposition().decode().splitlines()
    assert not any('engine="0"' in line for line in told), "nothing of an engine that is gone"
    assert 'penstock_num_requests_running{engine="1"} 5.0' in told, "named as before"
    assert any(line.startswith('penstock_engine_dropped_messages_total{engine="1",socket="workers"}') for line in told)
