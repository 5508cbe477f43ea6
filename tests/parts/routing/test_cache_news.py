"""What an engine tells of its prefix cache: whoever hears all of it, from a snapshot on, knows what is there."""

import asyncio
from array import array
from collections.abc import Callable, Collection
from itertools import pairwise
from random import Random

import pytest

from penstock.core.kv.content_keys import node_key
from penstock.core.kv.kv_pages import KVPages
from penstock.ipc.channel import PeerId
from penstock.ipc.messages import CacheEvents, Message
from penstock.ipc.page_keys import namespace_of, short_keys
from penstock.parts.routing.scheduler import changes as cache_changes
from penstock.parts.routing.scheduler import news as cache_news
from penstock.parts.routing.scheduler.changes import CacheChanges, Tiered
from penstock.parts.routing.scheduler.news import CacheNews
from tests.core.driver import Driver, make_limits, make_request


def numbers(column: bytes) -> set[int]:
    found = array("Q", column)
    assert len(set(found)) == len(found)
    return set(found)


def there(kv: KVPages) -> tuple[set[int], set[int]]:
    """The short keys of what is cached on the device and on the host, found by walking over all of it."""
    assert kv.cache is not None
    device = {node_key(node) for node in kv.cache.nodes() if node.parent is not None}
    host = set() if kv.tiers is None else set(kv.tiers.host.keys())
    return tuple({int.from_bytes(key[:8], "little") for key in keys} for keys in (device, host))  # type: ignore[return-value]


class Told:
    """What somebody knows who hears everything."""

    def __init__(self) -> None:
        self.tiers: tuple[set[int], set[int]] = set(), set()

    def hear(self, tiered: Tiered) -> None:
        for known, changes in zip(self.tiers, tiered, strict=True):
            gained, lost = numbers(changes.gained), numbers(changes.lost)
            assert not gained & lost
            known |= gained
            known -= lost


def busy_driver(seed: int, num_host_pages: int) -> tuple[Driver, Callable[[], None]]:
    """A scheduler whose few pages come and go, and what makes them do so."""
    driver, rng = Driver(make_limits(24, 4, num_host_pages=num_host_pages)), Random(seed)
    families = [[rng.randrange(900) for _ in range(24)] for _ in range(5)]
    numbers = iter(range(10**6))

    def work() -> None:
        prompt = rng.choice(families)[: rng.randint(1, 24)] + [rng.randrange(900) for _ in range(rng.randint(1, 8))]
        salt = rng.choice(["", "", "salt"])
        assert driver.add(make_request(f"r{next(numbers)}", prompt, rng.randint(1, 8), salt=salt)) is None
        for _ in range(rng.randint(1, 6)):
            driver.step()
        if rng.random() < 0.03:
            driver.scheduler.reset_prefix_cache()

    return driver, work


@pytest.mark.parametrize("num_host_pages", [0, 12])
@pytest.mark.parametrize("seed", range(4))
def test_who_hears_all_knows_all(seed: int, num_host_pages: int) -> None:
    driver, work = busy_driver(seed, num_host_pages)
    for _ in range(5):
        work()
    kv, rng, told = driver.scheduler.kv, Random(seed), Told()
    changes = CacheChanges(kv)
    parts = changes.contents(3)
    while (part := next(parts, None)) is not None:  # while it is told, things change
        told.hear(part)
        if rng.random() < 0.5:
            work()
        if rng.random() < 0.3:
            told.hear(changes.take(5))
    for _ in range(40):
        while changes.num_noted:
            told.hear(changes.take(rng.randint(1, 7)))
        assert told.tiers == there(kv)
        work()
    assert there(kv)[0]
    assert bool(there(kv)[1]) == bool(num_host_pages)


def test_prompts_find_the_keys_of_their_pages() -> None:
    """Both sides name pages alike: the engine by its tree, the frontend by the prompt."""
    driver = Driver(make_limits(64, 4))
    prompt = list(range(1, 20))
    for salt in ("", "salt"):
        driver.add(make_request(f"r{salt}", prompt, 2, salt=salt))
    driver.run()
    device, _ = there(driver.scheduler.kv)
    tokens = array("i", prompt).tobytes()
    found = [list(short_keys(salt, tokens, 4)) for salt in ("", "salt", "another")]
    assert [len(keys) for keys in found] == [4, 4, 4]
    assert set(found[0] + found[1]) <= device
    assert not set(found[2]) & device
    assert len(set(found[0] + found[1] + found[2])) == 12
    assert namespace_of("s", 100, 0, is_each_length_special=True) == "s"
    assert namespace_of("s", 100, 99, is_each_length_special=True) == ("s", 100)
    assert namespace_of("s", 100, 99, is_each_length_special=False) == ("s", 0)
    assert namespace_of("s", 100, 100, is_each_length_special=True) == "s"


def test_what_is_noted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_changes, "MAX_NOTED", 10)
    driver, work = busy_driver(0, 12)
    changes = CacheChanges(driver.scheduler.kv)
    for _ in range(20):
        work()
        assert changes.num_noted <= 11
    assert changes.has_overflown
    assert not changes.num_noted
    told = Told()
    changes.restart()
    for part in changes.contents(4):
        told.hear(part)
    assert told.tiers == there(driver.scheduler.kv)


class Channel:
    """Peers that hear everything, or do not; what was sent is in `sent`, with whom it reached."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[PeerId], CacheEvents]] = []

    def broadcast(self, peers: Collection[PeerId], message: Message) -> list[PeerId]:
        assert isinstance(message, CacheEvents)
        self.sent.append((list(peers), message))
        return []

    def of(self, peer: PeerId) -> list[CacheEvents]:
        return [message for peers, message in self.sent if peer in peers]


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"INTERVAL": 0.005, "MORE_SECONDS": 0.001, "PART_SECONDS": 0.001, "PART_PAGES": 3}.items():
        monkeypatch.setattr(cache_news, name, value)
    monkeypatch.setattr(cache_news, "MAX_CHANGES", 4)


def check_told(events: list[CacheEvents], kv: KVPages) -> None:
    """The numbers have no gap, and what they tell is all there is."""
    told = Told()
    begun = [i for i, each in enumerate(events) if each.part == 0]
    assert begun
    assert all(b.number == a.number + (b.part < 0) for a, b in pairwise(events[begun[-1] :]))
    parts = [each.part for each in events[begun[-1] :] if each.part >= 0]
    assert parts == list(range(len(parts)))
    for each in events[begun[-1] :]:
        told.hear(Tiered(each.device, each.host))
    assert told.tiers == there(kv)


@pytest.mark.usefixtures("_quick")
async def test_readers_come_at_any_time_and_hear_the_same() -> None:
    driver, work = busy_driver(1, 12)
    channel = Channel()
    news = CacheNews(channel)
    news.add(b"first")
    assert not channel.sent, "there is no cache yet"
    news.follow(driver.scheduler.kv, driver.scheduler.limits)
    assert channel.of(b"first")[0].page_size == 4
    for turn in range(60):
        work()
        news.changed()
        await asyncio.sleep(0.002)
        if turn == 20:
            news.add(b"second")
        if turn == 25:
            news.tell_all_of_it(b"second")  # it has missed something
        if turn == 30:
            news.add(b"third")
            news.remove(b"third")
    news.changed()
    await asyncio.sleep(0.2)
    for peer in (b"first", b"second"):
        check_told(channel.of(peer), driver.scheduler.kv)
    changes = [peers for peers, message in channel.sent if message.part < 0]
    assert changes[-1] == [b"first", b"second"], "encoded once for both"
    assert not channel.of(b"third") or channel.of(b"third")[-1].part >= 0
    assert sum(len(each.device.gained) // 8 > 4 for _, each in channel.sent) == 0
    news.close()


@pytest.mark.usefixtures("_quick")
async def test_another_cache_makes_void_what_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, work = busy_driver(2, 0)
    channel = Channel()
    news = CacheNews(channel)
    news.add(b"reader")
    news.follow(driver.scheduler.kv, driver.scheduler.limits)
    for _ in range(5):
        work()
    driver.scheduler.reset_worker()
    news.follow(driver.scheduler.kv, driver.scheduler.limits)
    await asyncio.sleep(0.05)
    assert channel.of(b"reader")[-1].is_last
    check_told(channel.of(b"reader"), driver.scheduler.kv)
    driver, work = busy_driver(3, 0)  # more changes than are kept
    monkeypatch.setattr(cache_changes, "MAX_NOTED", 10)
    news.follow(driver.scheduler.kv, driver.scheduler.limits)
    for _ in range(10):
        work()
    news.changed()
    await asyncio.sleep(0.1)
    check_told(channel.of(b"reader"), driver.scheduler.kv)
    news.close()
