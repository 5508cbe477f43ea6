"""What those who watch a scheduler are told: whole where there is room, counted where there is none, never too much."""

import asyncio
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from penstock.config.parts import with_parts
from penstock.core.scheduling.scheduler import ScheduledStep, Scheduler
from penstock.ipc.channel import PeerId
from penstock.ipc.codec import Codec, pack_int32, unpack_int32
from penstock.ipc.messages import AbortRequest, AddRequest, Message, StepResult, ToFrontend
from penstock.parts.watching.messages import (
    CACHED,
    FREE,
    HELD,
    OWNED,
    SHARED,
    ListPages,
    ListPrefixes,
    PageMap,
    PrefixTree,
    RequestLife,
    ShowLife,
    WatchedSteps,
    WatchSteps,
)
from penstock.parts.watching.scheduler import Watching
from penstock.parts.watching.scheduler import feed as feeds
from penstock.parts.watching.scheduler import lives as all_lives
from penstock.parts.watching.scheduler import page_map as maps
from penstock.parts.watching.scheduler.bucket import Bucket
from penstock.parts.watching.scheduler.feed import Feed
from penstock.parts.watching.scheduler.page_map import page_map
from penstock.parts.watching.scheduler.prefix_tree import Clock, prefix_tree
from penstock.parts.watching.scheduler.watchers import Watchers
from tests.core.driver import Driver, make_limits, make_request
from tests.core.engine.test_engine import Peers
from tests.core.scheduling.test_scheduler_traces import random_trace

T = TypeVar("T")


def all_of(parts: Generator[None, None, T]) -> T:
    """The result of work that is done in parts."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result


class Watched(Driver):
    """A driver of which a feed is told, as the engine tells it."""

    feed: Feed | None = None
    seconds = 0.001  # of the clock, for each call
    told: list[WatchedSteps]
    is_processing = False

    def watch(self) -> Feed:
        self.now += self.seconds
        self.told = []
        self.feed = Feed(self.scheduler, self.now)
        return self.feed

    def add(self, request: AddRequest, owner: bytes = b"frontend") -> Any:
        self.now += self.seconds
        refusal = super().add(request, owner)
        if self.feed is not None:
            self.feed.on_request(request, self.now)
        return refusal

    def abort(self, request_id: str, sequence_idx: int = -1) -> None:
        self.now += self.seconds
        if self.feed is not None and request_id in self.scheduler.requests:
            self.feed.on_steer(AbortRequest(request_id, sequence_idx), self.scheduler.requests[request_id], self.now)
        super().abort(request_id, sequence_idx)

    def schedule(self) -> ScheduledStep | None:
        self.now += self.seconds
        step = super().schedule()
        if self.feed is not None and step is not None:
            self.feed.planned(step, self.scheduler, self.now, self.now)
        return step

    def process(self) -> Any:
        self.now += self.seconds
        result = self.results[0]
        told = self.scheduler.process
        batches: list[Any] = []

        def process(*args: Any) -> Any:
            found = told(*args)
            batches.extend(found.values())
            return found

        self.scheduler.process = process  # type: ignore[method-assign, assignment]
        self.is_processing = True
        try:
            deltas = super().process()
        finally:
            self.scheduler.process = told  # type: ignore[method-assign]
            self.is_processing = False
        if self.feed is not None:
            self.feed.returned(result, batches, self.scheduler, self.now)
        return deltas

    def take(self, deltas: Any) -> None:
        super().take(deltas)
        if self.feed is not None and not self.is_processing:
            for each in deltas.values():
                self.feed.on_deltas(each, self.scheduler, self.now)

    def reset_worker(self, *args: Any, **options: Any) -> None:
        if self.feed is not None:
            self.feed.forget_planned(self.now)
        super().reset_worker(*args, **options)

    def take_told(self, *, is_whole: bool = False) -> WatchedSteps:
        assert self.feed is not None
        self.told.append(self.feed.take(self.scheduler, self.now, self.now, is_whole=is_whole))
        return self.told[-1]


def life_of(driver: Watched, wanted: str) -> RequestLife:
    assert driver.feed is not None
    return driver.feed.lives.tell(0, wanted, driver.now, 0.0)


def kinds(life: RequestLife) -> list[str]:
    return [event.kind for event in life.events]


# --- steps ------------------------------------------------------------------------------------


def test_steps_are_told_as_they_were_planned() -> None:
    driver = Watched(make_limits(page_size=4, max_num_batched_tokens=16))
    driver.seconds = 0.1  # there is room for all of them
    feed = driver.watch()
    driver.add(make_request("a", range(1, 41), 6))
    driver.add(make_request("b", range(50, 60), 9))
    driver.run()
    told = driver.take_told()
    assert (told.num_left_out, told.num_events_left_out) == (0, 0)
    assert [step.step_id for step in told.steps] == list(range(len(driver.steps)))
    rows: list[int] = []
    for step, planned in zip(told.steps, driver.steps, strict=True):
        assert planned.record is not None
        rows = rows if step.is_same else unpack_int32(step.rows).tolist()
        chunks = unpack_int32(step.chunks).tolist()
        assert len(rows) == planned.record.num_rows == step.num_decodes + len(chunks)
        assert step.num_decodes + sum(chunks) == planned.record.num_tokens
        assert (step.free_pages, step.cached_pages) == (planned.record.free_pages, planned.record.cached_pages)
        assert step.sent <= step.returned
    assert any(step.is_same for step in told.steps), "what stays the same is said once"
    assert feed.take(driver.scheduler, driver.now, 0.0, is_whole=False).steps == ()


def test_guesses_are_told_with_what_came_of_them() -> None:
    driver = Watched(guess=lambda row, position, most: [(7 * position) % 1000] * most)
    driver.seconds = 0.1
    driver.watch()
    driver.add(make_request("a", range(1, 9), 12))
    driver.run()
    steps = [step for step in driver.take_told().steps if step.guessed_tokens]
    assert steps
    for step in steps:
        [guessed], returned = unpack_int32(step.guessed_tokens), unpack_int32(step.returned_tokens).tolist() or [1]
        assert 0 <= returned[0] <= 1 + guessed


def busy(driver: Watched, num_steps: int, seconds: float, told_every: float = 0.2) -> list[WatchedSteps]:
    """So many steps of a full batch, with all clients' sequences coming and going."""
    rng, number, told_at = Random(0), 0, driver.now
    found: list[WatchedSteps] = []
    for _ in range(num_steps):
        while len(driver.scheduler.requests) < 2 * driver.limits.max_num_seqs:
            name = f"frontend-0:{number}:" + "x" * 80
            driver.add(make_request(name, [rng.randrange(900) for _ in range(rng.randint(1, 12))], rng.randint(1, 6)))
            number += 1
        driver.now += seconds
        driver.step()
        if driver.now - told_at > told_every:
            told_at = driver.now
            found.append(driver.take_told(is_whole=True))
    return found


def test_never_more_bytes_a_second_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand steps a second, all with other rows than the step before, and pictures all the time."""
    monkeypatch.setattr("tests.core.driver.check_invariants", lambda scheduler: None)
    driver = Watched(make_limits(2000, 4, max_num_seqs=64, max_num_batched_tokens=256))
    driver.seconds = 0.0
    driver.watch()
    began = driver.now
    codec: Codec[Any] = Codec(with_parts(ToFrontend, "TO_FRONTEND"))
    told = busy(driver, 1500, 0.001)
    seconds = driver.now - began
    sizes = [len(codec.encode(each)) for each in told]
    at_once = feeds.MAX_BYTES_PER_SECOND  # buckets begin full
    assert sum(sizes) <= seconds * feeds.MAX_BYTES_PER_SECOND + at_once
    steps = [step for each in told for step in each.steps]
    num_left_out = sum(each.num_left_out for each in told)
    assert 200 * seconds < len(steps) <= feeds.STEPS_PER_SECOND * seconds + feeds.STEPS_AT_ONCE
    assert num_left_out > len(steps), "most are left out"
    assert sum(each.num_events_left_out for each in told), "so are events"
    gaps = [step.num_left_out for step in steps]
    ids = [step.step_id for step in steps]
    assert gaps[1:] == [b - a - 1 for a, b in pairwise(ids)], "each says how many are not told"


def test_the_bucket_leaks() -> None:
    bucket = Bucket(10, 5, 0.0)
    assert [bucket.take(1, 0.0) for _ in range(6)] == [True] * 5 + [False]
    assert not bucket.take(1, 0.05)
    assert bucket.take(1, 0.1)
    assert not bucket.has_room(6, 1e9), "never more than so many at once"
    assert not bucket.take(1, -5.0 + 0.1) or bucket.has_room(4, 1e9), "clocks that stand still add nothing"


def test_a_picture_has_what_a_newcomer_needs() -> None:
    driver = Watched(make_limits(max_num_seqs=4))
    for name in "abcdef":
        driver.add(make_request(name, [ord(name)] * 5, 30))
    for _ in range(6):
        driver.step()
    driver.watch()
    picture = driver.take_told(is_whole=True).picture
    assert picture is not None
    assert (picture.num_rows, picture.num_pages, picture.page_size) == (4, 64, 4)
    assert {(each.row, each.request_id) for each in picture.running} == {
        (seq.row, seq.request_id) for seq in driver.scheduler.running
    }
    told = driver.take_told()
    assert told.picture is None
    assert [(each.request_id, each.reason.partition(":")[0]) for each in told.waiting] == [
        ("e", "no free row"),
        ("f", "behind the first"),
    ]
    assert told.reasons == {"no free row": 1, "behind the first": 1}
    for _ in range(4):
        driver.step()
    is_same = [step.is_same for step in driver.take_told().steps]
    assert is_same[0] is False, "who has just begun knows no step before"
    assert is_same[-1]


# --- lives ------------------------------------------------------------------------------------


def test_the_life_of_a_request_that_waits_and_is_preempted() -> None:
    driver = Watched(make_limits(6, 4, max_num_seqs=2, max_num_batched_tokens=8))
    driver.watch()
    driver.add(make_request("first", range(1, 11), 12))
    driver.add(make_request("other", range(20, 27), 12))
    driver.add(make_request("third", range(40, 45), 3))
    while driver.step():
        driver.take_told()
    lives = {name: life_of(driver, name) for name in ("first", "other", "third")}
    for name, life in lives.items():
        assert not life.is_live
        assert life.is_watched
        assert kinds(life)[0] == "arrived"
        assert kinds(life)[-1] == "finished"
        assert life.events[-1].tokens == len(driver.outputs[name, 0])
        assert life.events[-1].text == "length"
        admitted = [event for event in life.events if event.kind == "admitted"]
        lost = [event for event in life.events if event.kind == "preempted"]
        assert len(admitted) == 1 + len(lost)
        computed = sum(event.tokens for event in life.events if event.kind == "chunk")
        assert computed >= life.events[0].tokens - admitted[0].more
        # It waited at each moment in which it had no row, and for a reason.
        waits = [event for event in life.events if event.kind == "waited"]
        since = [life.events[0].at, *(event.at for event in lost)]
        for begin, entered in zip(since, admitted, strict=True):
            spans = [event for event in waits if begin <= event.at < entered.at]
            assert all(event.text for event in spans)
            assert spans[0].at == begin
            assert spans[-1].until == entered.at
            assert all(a.until == b.at for a, b in pairwise(spans)), "no gaps"
    assert sum("preempted" in kinds(life) for life in lives.values()) == (driver.scheduler.totals.num_preemptions > 0)
    assert driver.scheduler.totals.num_preemptions
    reasons = {
        event.text.partition(":")[0] for life in lives.values() for event in life.events if event.kind == "waited"
    }
    assert "no free row" in reasons or "no free pages" in reasons


def test_a_life_that_began_before_anybody_watched() -> None:
    driver = Watched(make_limits(max_num_seqs=1))
    driver.add(make_request("runs", range(1, 11), 30))
    driver.add(make_request("waits", range(20, 27), 12))
    for _ in range(5):
        driver.step()
    feed = driver.watch()
    feed.look(driver.scheduler, driver.now)
    running, waiting = life_of(driver, "runs"), life_of(driver, "waits")
    assert not running.is_watched
    assert kinds(running) == ["arrived", "waited", "admitted"]
    assert running.events[2].at == running.events[1].until > running.events[0].at
    assert kinds(waiting) == ["arrived", "waited"]
    assert waiting.events[1].text.startswith("no free row")
    assert (waiting.events[1].at, waiting.events[1].until) == (waiting.events[0].at, driver.now)
    assert life_of(driver, "nobody").request_id == ""


def test_lives_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_lives, "MAX_REQUESTS", 3)
    monkeypatch.setattr(all_lives, "MAX_FIRST_EVENTS", 4)
    monkeypatch.setattr(all_lives, "MAX_LAST_EVENTS", 5)
    driver = Watched(make_limits(max_num_batched_tokens=2, max_num_seqs=2))
    feed = driver.watch()
    for number in range(6):
        driver.add(make_request(f"r{number}", range(1, 40), 2, salt=str(number)))
    driver.run()
    assert len(feed.lives._lives) == 3
    assert not feed.lives._waits
    life = life_of(driver, "r5")
    assert len(life.events) == 9
    assert life.num_left_out > 5
    assert kinds(life)[0] == "arrived"
    assert kinds(life)[-1] == "finished"
    assert not feed._begun, "of those that have ended nothing is kept"


def test_what_is_aborted_ends_once() -> None:
    driver = Watched()
    feed = driver.watch()
    for name in "ab":
        driver.add(make_request(name, [1, 2, 3], 20, n=2))
    for _ in range(4):
        driver.step()
    driver.abort("a")
    driver.abort("b", 1)
    driver.run()
    ends = [(event.request_id, event.sequence_idx, event.text) for event in driver.take_told().events
            if event.kind == "finished"]  # fmt: skip
    assert sorted(ends) == [("a", 0, "abort"), ("a", 1, "abort"), ("b", 0, "length"), ("b", 1, "abort")]
    assert not life_of(driver, "a").is_live
    feed.on_owner_gone(b"frontend", driver.scheduler, driver.now)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_feed_keeps_up(seed: int) -> None:
    """Deaths, restarts, aborts: who lives is known, and maps and trees are right at any time."""

    class Always(Watched):
        def process(self) -> Any:
            deltas = super().process()
            if self.num_executed % 7 == 0:
                look(self)
            return deltas

        def restart_scheduler(self) -> None:
            super().restart_scheduler()
            self.watch()

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.watch()

    driver = random_trace(seed, make_driver=Always)
    assert isinstance(driver, Always)
    look(driver)
    assert driver.feed is not None
    assert all(not life.is_live for life in driver.feed.lives._lives.values())


def look(driver: Watched) -> None:
    told = driver.take_told(is_whole=True)
    assert told.picture is not None
    assert len(told.picture.running) == len(driver.scheduler.running)
    check_map(all_of(page_map(1, driver.scheduler)), driver.scheduler)
    if driver.scheduler.kv.cache is not None:
        check_tree(all_of(prefix_tree(ListPrefixes(1, 64, 2000), driver.scheduler, Clock(), 0.0)), driver.scheduler)


# --- pages ------------------------------------------------------------------------------------


def states(told: PageMap, tier: int = 0) -> list[tuple[int, int]]:
    runs = told.tiers[tier]
    columns = zip(*(unpack_int32(column) for column in (runs.codes, runs.groups, runs.lengths)), strict=True)
    return [(code, group) for code, group, length in columns for _ in range(length)]


def check_map(told: PageMap, scheduler: Scheduler) -> None:
    """Every page's state, against the pool's own books."""
    pool = scheduler.kv.pool
    of_page = states(told)
    assert len(of_page) == pool.num_pages
    users, cached = pool.user_counts(), pool.cached_flags()
    for page_id, (code, _) in enumerate(of_page):
        if users[page_id] == 0:
            assert code == (CACHED if cached[page_id] else FREE)
        else:
            assert code == (SHARED if users[page_id] > 1 else code)
            assert code in (SHARED, HELD) or code >= OWNED
    for seq in scheduler.running:
        code = OWNED + [owner[:2] for owner in told.owners].index((seq.request_id, seq.sequence_idx))
        for group, table in enumerate([seq.page_ids, *(table.page_ids for table in seq.window_tables)]):
            for page_id in table:
                assert of_page[page_id] in ((code, group), (SHARED, group))
    counts = told.tiers[0].counts
    assert sum(counts.values()) == pool.num_pages
    assert (counts["free"], counts["cached"]) == (pool.num_free, pool.num_cached)
    if scheduler.kv.tiers is not None:
        host = scheduler.kv.tiers.host
        counts = told.tiers[1].counts
        assert (counts["free"], counts["cached"]) == (host.num_free, host.num_cached)
        assert counts["held"] + counts["owned"] + counts["shared"] == host.num_held


def test_a_large_pool_is_shown_in_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "MAX_CELLS", 10)
    monkeypatch.setattr(maps, "_PART", 16)
    driver = Driver(make_limits(64, 4))
    driver.add(make_request("a", range(1, 120), 2))
    driver.step()
    parts = page_map(7, driver.scheduler)
    num_parts = 0
    while True:
        try:
            next(parts)
            num_parts += 1
        except StopIteration as end:
            told: PageMap = end.value
            break
    runs = told.tiers[0]
    assert num_parts > 4, "others have their turn meanwhile"
    assert (runs.cell, sum(unpack_int32(runs.lengths))) == (7, 10)
    assert unpack_int32(runs.codes).tolist() == [OWNED, FREE]
    assert runs.counts["owned"] == 30
    assert sum(runs.counts.values()) == 64


def test_windows_are_page_groups_of_their_own() -> None:
    driver = Driver(make_limits(64, 4, windows=[(4, 8)]))
    driver.add(make_request("a", range(1, 40), 9))
    for _ in range(3):
        driver.step()
    told = all_of(page_map(1, driver.scheduler))
    check_map(told, driver.scheduler)
    assert {group for code, group in states(told) if code >= OWNED} == {0, 1}
    driver.run()
    told = all_of(page_map(1, driver.scheduler))
    assert {group for code, group in states(told) if code == CACHED} == {0, 1}


# --- the prefix tree --------------------------------------------------------------------------


def check_tree(told: PrefixTree, scheduler: Scheduler) -> None:
    cache = scheduler.kv.cache
    assert cache is not None
    assert told.is_whole
    assert told.num_pages == cache.num_nodes == sum(node.num_tokens for node in told.nodes) // told.page_size
    for place, node in enumerate(told.nodes):
        assert node.parent < place
        below = [each for each in told.nodes if each.parent == place]
        assert node.num_children == len(below)
        assert node.num_tokens_below == sum(each.num_tokens + each.num_tokens_below for each in below)
        assert node.num_hits >= sum(each.num_hits for each in below)


def test_the_tree_of_prefixes() -> None:
    driver = Driver(make_limits(64, 4))
    common = list(range(1, 13))
    for name, rest, salt in (("a", [100] * 5, ""), ("b", [200] * 9, ""), ("c", [300], "salt")):
        driver.add(make_request(name, common + rest, 2, salt=salt))
        driver.run()
    clock = Clock()
    cache = driver.scheduler.kv.cache
    assert cache is not None
    clock.note(0, 1.0)
    clock.note(cache.clock, 5.0)
    told = all_of(prefix_tree(ListPrefixes(3), driver.scheduler, clock, 9.0))
    check_tree(told, driver.scheduler)
    assert told.num_namespaces == 2
    shared = next(node for node in told.nodes if node.num_children == 2 and node.parent >= 0)
    assert unpack_int32(shared.token_ids).tolist() == common
    assert (shared.num_tokens, shared.num_hits, shared.num_users) == (12, 1, 0)
    assert shared.last_used == 5.0
    assert {node.namespace for node in told.nodes if node.parent < 0} == {"", "salt"}
    few = all_of(prefix_tree(ListPrefixes(3, depth=1, most=1), driver.scheduler, clock, 9.0))
    assert (len(few.nodes), few.is_whole, few.num_pages) == (1, False, told.num_pages)
    assert few.nodes[0].num_tokens_below == max(node.num_tokens_below for node in told.nodes), "the largest comes first"


# --- the engine -------------------------------------------------------------------------------


async def answer_to(peers: Peers, question: Message, kind: type[T]) -> T:
    peers.frontend.send(question)
    async with asyncio.timeout(60):
        while not isinstance(message := await peers.to_frontend.get(), kind):
            pass
    return message


@pytest.fixture
async def peers(tmp_path: Path) -> Any:
    peers = Peers(tmp_path)
    await peers.ready()
    yield peers
    peers.close()


async def one_step(peers: Peers) -> None:
    plan = await peers.plan()
    peers.worker.send(StepResult(plan.step_id, pack_int32([5] * sum(plan.samples))))


def watching_of(peers: Peers) -> Watching:
    watching = peers.engine.parts.get(Watching)
    assert watching is not None
    return watching


async def test_nothing_is_noted_while_nobody_watches(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """No feed, no record, no timer: a step that is planned and returns asks one attribute each time."""

    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("somebody notes a step")

    monkeypatch.setattr(Feed, "__init__", fail)
    monkeypatch.setattr("penstock.core.scheduling.scheduler.make_record", fail)
    peers.frontend.send(make_request("a", [1, 2, 3], 3))
    for _ in range(3):
        await one_step(peers)
    assert (await peers.delta()).token_ids == (5,)
    watching = watching_of(peers)
    assert watching.feed is None
    assert watching._watchers is None
    assert not peers.engine.parts.want_records


async def test_a_lease_ends(peers: Peers) -> None:
    told = await answer_to(peers, WatchSteps(0.3), WatchedSteps)
    watching = watching_of(peers)
    assert told.picture is not None
    assert watching.feed is not None
    async with asyncio.timeout(60):
        while watching.feed is not None:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.05)
    await answer_to(peers, WatchSteps(30), WatchedSteps)
    peers.frontend.send(WatchSteps(0))
    async with asyncio.timeout(60):
        while watching.feed is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_an_engine_tells_of_its_steps_and_answers(peers: Peers) -> None:
    await answer_to(peers, WatchSteps(60), WatchedSteps)
    peers.frontend.send(make_request("f:1:mine", [1, 2, 3, 4, 5, 6, 7], 4))
    for _ in range(4):
        await one_step(peers)
    steps: list[Any] = []
    events: list[str] = []
    async with asyncio.timeout(60):
        while "finished" not in events or len(steps) < 4:
            if isinstance(message := await peers.to_frontend.get(), WatchedSteps):
                steps += message.steps
                events += [event.kind for event in message.events]
    assert [step.step_id for step in steps] == [0, 1, 2, 3]
    assert [event for event in events if event != "waited"] == ["arrived", "admitted", "first token", "finished"]
    life = await answer_to(peers, ShowLife(9, "mine"), RequestLife)
    assert (life.number, life.request_id, life.is_live) == (9, "f:1:mine", False)
    told = await answer_to(peers, ListPages(10), PageMap)
    assert told.number == 10
    assert told.tiers[0].counts["cached"] == 2
    tree = await answer_to(peers, ListPrefixes(11), PrefixTree)
    assert (tree.num_pages, tree.num_namespaces) == (2, 1)


async def test_questions_need_no_watching(peers: Peers) -> None:
    peers.frontend.send(make_request("lives", [1, 2, 3], 4))
    await one_step(peers)
    life = await answer_to(peers, ShowLife(1, "lives"), RequestLife)
    assert (life.is_live, life.is_watched, life.events[0].kind) == (True, False, "arrived")
    assert watching_of(peers).feed is None
    assert (await answer_to(peers, ShowLife(2, "nobody"), RequestLife)).request_id == ""


async def test_a_frontend_that_is_gone_watches_no_more() -> None:
    sent: list[tuple[list[PeerId], Message]] = []

    class Channel:
        def broadcast(self, peers: Any, message: Message) -> list[PeerId]:
            sent.append((list(peers), message))
            return list(peers)  # nobody gets it, and nobody minds

    shown: list[Feed | None] = []
    watchers = Watchers(Channel(), lambda: None, shown.append)
    for peer in (b"a", b"b"):
        watchers.watch(peer, WatchSteps(30))
    async with asyncio.timeout(60):
        while not sent:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert sent[0][0] == [b"a", b"b"]
    watchers.remove(b"a")
    watchers.remove(b"c")
    assert len(shown) == 1
    watchers.remove(b"b")
    assert shown[1] is None
    watchers.close()
