"""The host tier's pages: free, cached and held, and the keys by which they are found."""

from array import array
from random import Random

from penstock.core.kv.content_keys import node_key, window_key
from penstock.core.kv.host_tier import HostTier
from penstock.core.kv.page_pool import PagePool, PrefixCache
from penstock.ipc.page_keys import page_key, root_key


def check(tier: HostTier) -> None:
    """Every page is in exactly one state, and keys and pages know each other."""
    holders, free, cached = tier.holder_counts(), tier.free_pages(), tier.cached_pages()
    held = [page for page, count in enumerate(holders) if count]
    assert sorted(free + cached + held) == list(range(tier.num_pages))
    assert (tier.num_free, tier.num_cached, tier.num_held) == (len(free), len(cached), len(held))
    assert all(tier.key_of(page) for page in cached)
    assert not any(tier.key_of(page) for page in free)
    assert all(tier.key_of(page) == key for key, page in tier.keys().items())
    assert len(tier.keys()) == sum(bool(tier.key_of(page)) for page in range(tier.num_pages))


def test_least_recently_used_goes_first() -> None:
    tier = HostTier(3)
    for key in (b"a", b"b", b"c"):
        page = tier.take()
        tier.name(page, key)
        tier.release(page)
    tier.touch(tier.find(b"a"))
    tier.hold(tier.find(b"b"))
    assert tier.take() >= 0
    assert tier.find(b"c") == -1 < tier.find(b"a")
    assert tier.take() >= 0
    assert tier.take() == -1
    assert tier.find(b"a") == tier.find(b"c") == -1 < tier.find(b"b")
    check(tier)


def test_a_key_names_one_page() -> None:
    tier = HostTier(2)
    first, second = tier.take(), tier.take()
    tier.name(first, b"k")
    tier.name(second, b"k")
    assert tier.find(b"k") == first
    assert not tier.key_of(second)
    tier.release(second)
    assert tier.num_free == 1, "a page without a key has no content for anybody"
    tier.release(first)
    tier.forget(first)
    assert tier.num_free == 2
    assert tier.find(b"k") == -1
    check(tier)


def test_random_use_is_counted() -> None:
    rng = Random(0)
    tier = HostTier(7)
    held: list[int] = []
    for _ in range(4000):
        match rng.randrange(6):
            case 0 | 1:
                page = tier.take()
                assert (page < 0) == (len(set(held)) == tier.num_pages)
                if page >= 0:
                    held.append(page)
            case 2 if held:
                page = rng.choice(held)
                if not tier.key_of(page):
                    tier.name(page, b"%d" % rng.randrange(12))
            case 3 if held:
                tier.release(held.pop(rng.randrange(len(held))))
            case 4 if (page := tier.find(b"%d" % rng.randrange(12))) >= 0:
                tier.hold(page)
                held.append(page)
            case 5 if rng.random() < 0.1:
                tier.forget(rng.randrange(tier.num_pages))
            case _:
                tier.touch(rng.randrange(tier.num_pages))
        check(tier)
        assert sum(tier.holder_counts()) == len(held)


def test_keys_are_chains_over_namespace_and_tokens() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, 2)
    tokens = array("i", [1, 2, 3, 4])
    node = cache.acquire(("salt", 7), None)
    for i, page_id in enumerate(pool.allocate(2)):
        node = cache.extend(node, tokens[2 * i : 2 * i + 2].tobytes(), page_id)
    expected = page_key(page_key(root_key(("salt", 7)), tokens[:2].tobytes()), tokens[2:].tobytes())
    assert node_key(node) == node_key(node) == expected
    assert len(expected) == 16
    assert root_key(("salt", 7)).hex() == "f443bb7aa4e4247cebe396580710f540", (
        "the same in every process: a lower tier outlives this one"
    )
    others = {
        root_key(""),
        root_key("salt"),
        root_key(("salt", 8)),
        window_key(expected, 1, 0),
        window_key(expected, 2, 0),
    }
    assert len(others | {expected}) == 6
