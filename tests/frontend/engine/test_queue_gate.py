"""Who is refused before tokenizing, and when he is told to come again."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.config import SchedulerOptions
from penstock.frontend.engine.link import MAX_RETRY_SECONDS, Load, QueueGate, retry_after
from penstock.frontend.errors import Overloaded
from penstock.ipc.messages import EngineReady, EngineStats, WaitingTenant
from penstock.ipc.queue_turns import WaitingCounts
from tests.frontend.http_client import HELLO, chat, complete, error_of, post
from tests.frontend.live_server import LiveServer

IDLE = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, is_ready=True)
BUSY = replace(IDLE, num_rows=8, num_running=8)


class Told:
    """An engine, and what it said last."""

    last_facts: EngineReady | None = None
    takes_requests = True

    def __init__(self, stats: EngineStats | None) -> None:
        self.tell(stats)

    def tell(self, stats: EngineStats | None) -> None:
        self.stats, self.sent = stats, Load()

    def gate(self, max_seqs: int = 10, max_tokens: int = 1000, *others: "Told") -> QueueGate:
        options = SchedulerOptions(max_num_queued_seqs=max_seqs, max_num_queued_tokens=max_tokens)
        engines = [self, *others]
        return QueueGate(options, lambda: [each for each in engines if each.takes_requests] or engines)


def refused(gate: QueueGate, num_seqs: int = 1, num_tokens: int = 0) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        gate.check(num_seqs, num_tokens)
    return caught.value


def test_a_burst_between_two_reports_does_not_overshoot() -> None:
    told = Told(replace(BUSY, num_waiting=4))
    gate = told.gate()
    with ExitStack() as tokenizing:
        for _ in range(3):
            tokenizing.enter_context(gate.reserve(1, 10, ""))
        for _ in range(3):
            gate.check()
            told.sent.add("", 1, 10)
        assert "10 sequences are waiting, the limit is 10" in refused(gate).message
    gate.check(3)
    refused(gate, 4)
    told.sent.num_ended += 2
    gate.check(5)
    told.tell(replace(BUSY, num_waiting=9))  # this one knows of all
    gate.check()
    refused(gate, 2)


def test_free_rows_are_room_too() -> None:
    told = Told(replace(IDLE, num_rows=8, num_running=2))
    gate = told.gate(max_seqs=1, max_tokens=50)
    for _ in range(6):
        gate.check(1, 40)
        told.sent.add("", 1, 40)
    gate.check()
    told.sent.add("", 1, 40)
    refused(gate)


def test_the_queues_of_several_engines_count_as_one() -> None:
    full = replace(BUSY, num_waiting=10, num_waiting_tokens=900, drained_seqs_per_second=1.0)
    first, second = Told(full), Told(replace(full, num_waiting=7))
    gate = first.gate(10, 1000, second)
    gate.check(3, 100)
    assert "17 sequences are waiting, the limit is 20" in refused(gate, 4).message
    assert "1800 tokens, the limit is 2000" in refused(gate, 1, 201).message
    second.sent.add("", 2, 10)
    with gate.reserve(1, 10, ""):
        assert refused(gate, 7).retry_after == 4, "both empty"
    second.takes_requests = False
    assert "10 sequences are waiting, the limit is 10" in refused(gate).message
    first.takes_requests = False
    gate.check()  # nobody can say anything: the engines have the last word
    second.takes_requests = True
    second.tell(replace(IDLE, num_rows=8, num_running=2))
    gate.check(16)
    refused(gate, 17)


def test_the_scheduler_s_limits_count() -> None:
    told = Told(replace(BUSY, num_waiting=4))
    gate = told.gate(max_seqs=4)
    refused(gate)
    told.last_facts = EngineReady(1, "m", 64, 100, 16, 10, 8, max_num_queued_seqs=5)
    gate.check()
    refused(gate, 2)


def test_tokens_are_bounded_unless_nobody_waits() -> None:
    told = Told(BUSY)
    gate = told.gate()
    with gate.reserve(1, 5000, ""):
        assert "5000 tokens, the limit is 1000" in refused(gate).message
        told.sent.add("", 1, 900)  # it had fewer than bytes
    gate.check(1, 100)
    refused(gate, 1, 101)
    told.tell(replace(BUSY, num_waiting=1, num_waiting_tokens=990))
    refused(gate, 1, 11)


def test_retry_after_is_what_must_leave_by_the_rate_at_which_it_leaves() -> None:
    stats = replace(BUSY, num_waiting=10, drained_seqs_per_second=0.5, drained_tokens_per_second=100.0)
    assert refused(Told(stats).gate(), 3).retry_after == 6
    stats = replace(stats, num_waiting=1, num_waiting_tokens=900)
    assert refused(Told(stats).gate(), 1, 800).retry_after == 7
    assert retry_after([stats], 1, 1) == 2
    assert retry_after([stats], 1 << 20) == MAX_RETRY_SECONDS
    assert retry_after([], 5) == 1
    assert retry_after([BUSY], 5) >= 1


def test_who_would_wait_too_long_is_refused_and_nobody_else() -> None:
    heavy, few = WaitingTenant("heavy", 900, 6), WaitingTenant("few", 2, 2)
    stats = replace(BUSY, num_waiting=902, waiting_tenants=(heavy, few), max_turns=8, drained_seqs_per_second=2.0)
    told = Told(stats)
    gate = told.gate(max_seqs=1000)
    with pytest.raises(Overloaded, match="8 others would have their turn before; at most 8 may") as caught:
        gate.check(tenant="heavy")
    assert caught.value.retry_after == 1
    with pytest.raises(Overloaded):
        gate.check()
    gate.check(tenant="few")
    gate.check(tenant="new")
    with ExitStack() as tokenizing:
        for _ in range(2):
            tokenizing.enter_context(gate.reserve(1, 10, "few"))
        with pytest.raises(Overloaded):
            gate.check(tenant="few")
        gate.check(tenant="new")
    told.sent.num_ended += 3
    gate.check(tenant="heavy")
    Told(replace(stats, max_turns=0)).gate(max_seqs=1000).check(tenant="heavy")


def turns_before(tenant: str, waiting: Collection[WaitingTenant]) -> int:
    """As `WaitingCounts.turns_before`, one tenant after the other."""
    own = sum(each.num_groups for each in waiting if each.tenant == tenant)
    return own + sum(min(each.num_seqs, own + 1) for each in waiting if each.tenant != tenant)


def test_turns_are_counted_as_one_tenant_after_the_other_would() -> None:
    random, counts = Random(5), WaitingCounts()
    sent: list[tuple[str, int]] = []
    for _ in range(500):
        if sent and random.random() < 0.45:
            tenant, num_seqs = sent.pop(random.randrange(len(sent)))
            counts.add(tenant, -num_seqs, -1)
        else:
            sent.append((f"t{random.randrange(9)}", random.choice((1, 1, 2, 40))))
            counts.add(*sent[-1], 1)
        names = {tenant for tenant, _ in sent}
        waiting = [
            WaitingTenant(name, sum(n for tenant, n in sent if tenant == name), [t for t, _ in sent].count(name))
            for name in names
        ]
        assert set(counts.tenants()) == set(waiting)
        assert [counts.turns_before(f"t{i}") for i in range(10)] == [turns_before(f"t{i}", waiting) for i in range(10)]


def test_a_refusal_looks_at_no_other_tenant() -> None:
    class Counting(tuple[WaitingTenant, ...]):
        num_read = 0

        def __iter__(self) -> Iterator[WaitingTenant]:
            Counting.num_read += 1
            return super().__iter__()

    tenants = Counting(WaitingTenant(f"t{i}", 1 + i % 3, 1) for i in range(100))
    told = Told(replace(BUSY, num_waiting=200, waiting_tenants=tenants, max_turns=8))
    gate = told.gate(max_seqs=1000)
    for num_others in range(100, 105):
        with pytest.raises(Overloaded, match=f"{num_others} others would have their turn before"):
            gate.check(tenant="new")
        told.sent.add(f"u{num_others}", 1, 1)
    assert Counting.num_read == 1
    told.tell(told.stats)
    with pytest.raises(Overloaded, match="100 others"):
        gate.check(tenant="new")
    assert Counting.num_read == 2


def test_a_full_queue_does_not_shut_out_who_has_nothing_in_it() -> None:
    stats = replace(BUSY, num_waiting=10, waiting_tenants=(WaitingTenant("heavy", 10, 1),))
    gate = Told(stats).gate(max_seqs=10)
    with pytest.raises(Overloaded):
        gate.check(tenant="heavy")
    gate.check(10, tenant="new")
    with pytest.raises(Overloaded):
        gate.check(11, tenant="new")


def test_a_request_asks_once_unless_it_has_several_sequences(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    class Counting(QueueGate):
        def check(self, *of_request: Any, **named: Any) -> None:
            asked.append(of_request)
            super().check(*of_request, **named)

    monkeypatch.setattr(live.server.service.engine.queue, "__class__", Counting)
    assert chat(live).status == 200
    assert complete(live).status == 200
    assert post(live, "/v1/messages", {"messages": HELLO, "max_tokens": 4}).status == 200
    assert post(live, "/v1/responses", {"input": "Hello"}).status == 200
    assert post(live, "/api/chat", {"messages": HELLO, "stream": False}).status == 200
    assert post(live, "/v1/embeddings", {"input": "Hello"}).status == 200
    assert [num_seqs for num_seqs, *_ in asked] == [1] * 6
    asked.clear()
    assert complete(live, n=3).status == 200
    assert [num_seqs for num_seqs, *_ in asked] == [1, 3]


def test_a_full_queue_refuses_before_it_looks_at_a_request(live: LiveServer) -> None:
    told = live.scheduler.stats(num_rows=8, num_running=8, num_waiting=1000)
    live.do(lambda: live.scheduler.tell(told))
    live.wait_until(lambda: live.server.service.engine.stats == told)
    try:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/infill"):
            error_of(post(live, path, {"model": "unknown"}), 429)
        assert post(live, "/v1/messages", {"model": "unknown"}).status == 529
        assert post(live, "/api/chat", {"model": "unknown"}).status == post(live, "/api/embed", {"input": "a"}).status
    finally:
        live.do(lambda: live.scheduler.tell(live.scheduler.stats()))
        live.wait_until(lambda: live.server.service.engine.stats.num_waiting == 0)  # type: ignore[union-attr]


def test_a_place_changes_its_size_in_one_act() -> None:
    gate = Told(replace(BUSY, num_waiting=8)).gate()
    with gate.reserve(1, 10, "") as place:
        gate.check(1)
        refused(gate, 2)
        place.resize(2, 20, "")  # its own place does not count
        refused(gate, 1)
        with pytest.raises(Overloaded):
            place.resize(3, 30, "")
        gate.check(2)  # what it held was given back
    gate.check(2)


def test_places_come_back_whatever_becomes_of_a_request(live: LiveServer) -> None:
    gate = live.server.service.engine.queue
    told = live.scheduler.stats(num_rows=8, num_running=8, num_waiting=998)
    live.do(lambda: live.scheduler.tell(told))
    live.wait_until(lambda: live.server.service.engine.stats == told)
    try:
        for _ in range(4):
            assert complete(live).status == 200
            assert complete(live, max_tokens=-2).status == 400
            assert complete(live, structured_outputs={"regex": "("}).status == 400
            assert complete(live, prompt="\ud800", n=2).status in (200, 400)
        error_of(complete(live, n=3), 429)
        assert not [request for request in live.scheduler.added if request.n == 3], "refused before it was sent"
        live.do(lambda: gate.check(2))
    finally:
        live.do(lambda: live.scheduler.tell(live.scheduler.stats()))
        live.wait_until(lambda: live.server.service.engine.stats.num_waiting == 0)  # type: ignore[union-attr]
