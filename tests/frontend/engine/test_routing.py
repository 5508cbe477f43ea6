"""Which engine a request goes to: by each policy, and over whole loads in virtual time."""

import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast, get_args, get_type_hints

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from penstock.config import FrontendOptions, SchedulerOptions
from penstock.frontend.engine.book import LiveRequest
from penstock.frontend.engine.link import EngineLink, Load
from penstock.frontend.engine.router.registry import POLICIES
from penstock.frontend.engine.router.router import EngineRouter
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import AddRequest, CacheEvents, EngineStats, SamplingParams, SequenceDelta, TierChanges
from penstock.ipc.page_keys import namespace_of, short_keys
from tests.frontend.engine.virtual_engines import Client, Conversation, Fleet, Turn, VirtualLink

STATS = EngineStats(0, 0, 16, 1000, 1000, 0, 0, 0, 0, 0, 0, 0, is_ready=True)
PREFIX = list(range(1, 1025))


def column(tokens: list[int], salt: str = "", adapter: str = "") -> bytes:
    """The pages of these tokens, as an engine tells them."""
    namespace = namespace_of(salt, len(tokens), 0, is_each_length_special=False, adapter=adapter)
    return b"".join(key.to_bytes(8, "little") for key in short_keys(namespace, pack_int32(tokens), 16))


class Group:
    """Links to engines that say what a test wants, and a router over them."""

    def __init__(self, policy: str, num_engines: int, seed: int = 0) -> None:
        self.registry = CollectorRegistry()
        self.router = EngineRouter(policy, SchedulerOptions(), self.registry, seed)
        self.links = [
            VirtualLink(
                facts=SimpleNamespace(), last_facts=None, stats=STATS, sent=Load(), takes_requests=True,
                on_cache_events=None, send=lambda message: True,
            )
            for _ in range(num_engines)
        ]  # fmt: skip
        self._numbers: Iterator[int] = iter(range(10**6))
        for i, link in enumerate(self.links):
            self.router.join(cast(EngineLink, link), str(i))

    def caches(
        self, engine: int, tokens: list[int], salt: str = "", *, on_host: bool = False, adapter: str = ""
    ) -> None:
        """From now on, this is all that an engine has cached."""
        told, none = TierChanges(column(tokens, salt, adapter)), TierChanges()
        device, host = (none, told) if on_host else (told, none)
        take = self.links[engine].on_cache_events
        if take is not None:
            take(CacheEvents(0, device, host, 0, True, 16))

    def says(self, engine: int, **stats: Any) -> None:
        self.links[engine].stats = replace(STATS, **stats)

    def request(self, tokens: list[int], salt: str = "", adapter: str = "") -> LiveRequest:
        sampling = SamplingParams(max_tokens=8)
        name = f"r{next(self._numbers)}"
        request = AddRequest(name, pack_int32(tokens), sampling, cache_salt=salt, adapter=adapter)
        return LiveRequest(request, Client([]), 0)

    def choose(self, live: LiveRequest) -> int:
        takes = [cast(EngineLink, link) for link in self.links if link.takes_requests]
        return self.links.index(cast(Any, self.router.choose(live, takes)))

    def send(self, live: LiveRequest) -> int:
        chosen = self.choose(live)
        live.message(0.0)
        self.router.sent(live, cast(EngineLink, self.links[chosen]))
        return chosen

    def told(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"penstock_router_{name}_total", labels) or 0.0


def test_the_options_name_the_policies_there_are() -> None:
    annotated = get_type_hints(FrontendOptions, include_extras=True)["routing"]
    assert set(get_args(get_args(annotated)[0])) == set(POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_only_engines_that_take_requests_are_chosen(policy: str, seed: int) -> None:
    group, rng = Group(policy, 4, seed), random.Random(seed)
    for i in range(4):
        group.caches(i, PREFIX[: 256 * i])
    chosen = set()
    lives: list[LiveRequest] = []
    for _ in range(300):
        for link in group.links:
            link.takes_requests = rng.random() < 0.5
        group.links[rng.randrange(4)].takes_requests = True
        live = group.request(PREFIX[: rng.randint(1, 1024)])
        number = group.send(live)
        assert group.links[number].takes_requests
        chosen.add(number)
        lives.append(live)
        if rng.random() < 0.7:
            group.router.gone(lives.pop(rng.randrange(len(lives))))
    for live in lives:
        group.router.gone(live)
        group.router.gone(live)
    assert chosen == {0, 1, 2, 3}
    assert not group.router._routed
    assert all(engine.load() == 0 for engine in group.router.engines), "what has ended is no load"


def test_turns_are_even() -> None:
    group = Group("round-robin", 3)
    assert sorted(group.send(group.request([1])) for _ in range(30)) == sorted([0, 1, 2] * 10)


def test_an_adapters_prompt_goes_where_its_own_pages_are() -> None:
    for seed in range(20):
        group = Group("prefix", 5, seed)
        group.caches(1, PREFIX)
        group.caches(2, PREFIX, adapter="sql@1")
        assert group.choose(group.request([*PREFIX, 5])) == 1
        assert group.choose(group.request([*PREFIX, 5], adapter="sql@1")) == 2
    group = Group("prefix", 1)
    group.caches(0, PREFIX, adapter="sql@1")
    group.send(group.request([*PREFIX, 5], adapter="sql@2"))
    assert group.told("requests", engine="0", reason="new") == 1, "another version of it is another adapter"


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    for seed in range(20):
        group = Group("prefix", 5, seed)
        for i, num_tokens in enumerate((0, 512, 1024, 256, 0)):
            group.caches(i, PREFIX[:num_tokens])
        assert group.choose(group.request([*PREFIX, 5])) == 2
        group.caches(2, PREFIX, "salt")
        assert group.choose(group.request([*PREFIX, 5])) == 1, "others' pages are of no use"
        assert group.choose(group.request([*PREFIX, 5], "salt")) == 2
        group.caches(1, PREFIX, on_host=True)
        assert group.choose(group.request([*PREFIX, 5])) == 1
        group.caches(4, PREFIX)
        assert group.choose(group.request([*PREFIX, 5])) == 4, "the device's pages are worth more than the host's"


def test_until_more_waits_there_than_it_saves() -> None:
    group = Group("prefix", 2)
    group.caches(0, PREFIX)
    group.says(0, num_waiting=2, num_waiting_tokens=1000)
    assert group.choose(group.request([*PREFIX, 5])) == 0
    group.says(0, num_waiting=20, num_waiting_tokens=10000)
    assert group.choose(group.request([*PREFIX, 5])) == 1
    group.says(1, num_waiting=20, num_waiting_tokens=10000)
    assert group.choose(group.request([*PREFIX, 5])) == 0
    group.says(0, num_used_pages=1000, num_free_pages=0, num_running=4)
    group.says(1, num_running=4)
    assert group.choose(group.request([7] * 640)) == 1, "there are pages"


def test_what_was_sent_counts_before_anybody_tells_of_it() -> None:
    group = Group("prefix", 2, seed=1)
    for i in range(2):
        group.caches(i, [])
    lives = [group.request([*PREFIX, 5])]
    first = group.send(lives[0])
    assert group.choose(group.request([*PREFIX, 6])) == first, "the prefix is expected where it will be"
    assert group.choose(group.request([9] * 100)) == 1 - first, "a stranger goes where nothing waits"
    for _ in range(60):
        lives.append(group.request([*PREFIX, 6]))
        group.send(lives[-1])
    sent = [sum(routed.engine.label == str(i) for routed in group.router._routed.values()) for i in range(2)]
    assert min(sent) > 15, "a burst does not pile up at one engine"
    lives[0].sink.push(0, SequenceDelta(lives[0].request.request_id, 0, (1,), num_cached_tokens=16))
    assert not isinstance(lives[0].sink, type(lives[1].sink)), "nobody looks at it after its first token"
    assert group.told("found_tokens", engine=str(first)) == 16
    assert group.told("expected_tokens", engine=str(first)) == 0
    assert group.told("requests", engine=str(first), reason="new") == 1


def test_a_full_queue_sends_it_to_another_engine() -> None:
    group = Group("prefix", 2)
    group.caches(0, PREFIX)
    options = SchedulerOptions()
    group.says(0, num_waiting=options.max_num_queued_seqs, num_waiting_tokens=0, num_rows=0)
    assert group.choose(group.request([*PREFIX, 5])) == 1
    group.says(1, num_waiting=options.max_num_queued_seqs, num_waiting_tokens=0, num_rows=0)
    assert group.choose(group.request([*PREFIX, 5])) == 0, "the scheduler has the last word"
    live = group.request([*PREFIX, 5])
    live.tried = (cast(EngineLink, group.links[0]),)
    assert group.choose(live) == 1
    live.tried = tuple(cast(EngineLink, link) for link in group.links)
    assert group.choose(live) == 0


# --- loads in virtual time ---------------------------------------------------------------------------


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, 4000) for _ in range(count)]


def shared_prefixes(seed: int, num_prefixes: int = 32, num_clients: int = 16, per_client: int = 16) -> list[Client]:
    """Short conversations under one of many system prompts of 1,024 tokens."""
    rng = random.Random(seed)
    systems = [words(rng, 1024) for _ in range(num_prefixes)]

    def conversation() -> Conversation:
        turns = [Turn(words(rng, rng.randint(24, 64)), rng.randint(16, 48)) for _ in range(rng.choice((1, 1, 1, 2)))]
        return [turns[0]._replace(tokens=rng.choice(systems) + turns[0].tokens), *turns[1:]]

    return [Client([conversation() for _ in range(per_client)]) for _ in range(num_clients)]


@pytest.mark.parametrize("seed", range(6 if "PENSTOCK_SOAK" in os.environ else 1))
def test_more_is_found_cached_than_by_turns_and_the_engines_are_even(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    found = {}
    for policy in ("round-robin", "prefix"):
        fleet = Fleet(policy, monkeypatch, num_pages=1136, seed=seed)
        found[policy] = fleet.run(shared_prefixes(seed))
    hits = found["prefix"].num_cached / found["round-robin"].num_cached
    print(f"hits {hits:.2f} times, busiest over mean {found['prefix'].busiest_over_mean:.3f}")
    assert hits > 1.5
    assert found["prefix"].busiest_over_mean < 0.1
    assert found["prefix"].seconds < found["round-robin"].seconds
    assert found["prefix"].found == pytest.approx(found["prefix"].expected, rel=0.1)


@pytest.mark.parametrize("num_frontends", [1, 3])
def test_a_prefix_that_all_have_in_common_does_not_overload_one_engine(
    monkeypatch: pytest.MonkeyPatch, num_frontends: int
) -> None:
    rng = random.Random(0)
    prefix = words(rng, 1024)
    clients = [Client([[Turn(prefix + words(rng, 40), rng.randint(32, 96))] for _ in range(16)]) for _ in range(24)]
    seen = Fleet("prefix", monkeypatch, num_frontends=num_frontends).run(clients, pause=0.0)
    assert seen.busiest_over_mean < 0.2
    assert seen.num_cached > 0.9 * seen.num_prompt


def test_a_conversation_stays_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    turns = [Turn(words(rng, 60), 20) for _ in range(12)]
    seen = Fleet("prefix", monkeypatch, num_engines=4).run([Client([turns])])
    assert len(set(seen.chosen)) == 1
    assert seen.found == seen.expected > 0


def test_frontends_with_the_same_old_figures_do_not_all_choose_the_same_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(0)
    clients = [Client([[Turn(words(rng, 400), 40)] for _ in range(6)]) for _ in range(48)]
    seen = Fleet("prefix", monkeypatch, num_engines=4, num_frontends=4).run(clients)
    assert seen.busiest_over_mean < 0.15
