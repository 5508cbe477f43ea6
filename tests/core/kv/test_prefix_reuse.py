"""The prefix cache and forks: what is computed, what is shared, what is kept, to the page."""

from array import array

import pytest

from penstock.core.kv.page_pool import CacheNode, OutOfPagesError, PagePool, PrefixCache
from penstock.ipc.codec import unpack_int32
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_shared", [0, 3, 4, 15, 16, 17, 32, 33])
def test_cached_tokens_are_exact_to_the_page(page_size: int, num_shared: int) -> None:
    driver = Driver(make_limits(num_pages=200, page_size=page_size))
    driver.add(make_request("first", range(33), 3))
    driver.run()
    num_computed = driver.worker.num_computed
    prompt = [*range(num_shared), *range(500, 533 - num_shared)] if num_shared < 33 else list(range(33))
    driver.add(make_request("second", prompt, 3))
    driver.run()
    expected = min(num_shared, 32) // page_size * page_size
    assert driver.num_cached["second", 0] == expected
    assert driver.finished["second", 0].num_cached_tokens == 0, "told once, in the first delta"
    assert driver.worker.num_computed - num_computed == 33 - expected + 2
    assert driver.scheduler.stats().num_cached_tokens == expected
    assert driver.outputs["second", 0] == solo_run(prompt, make_request("", [0], 3).sampling, 0, driver.limits)


def test_outputs_are_cached_too() -> None:
    driver = Driver(make_limits(page_size=4))
    driver.add(make_request("turn-1", range(6), 9))
    driver.run()
    answer = driver.outputs["turn-1", 0]
    driver.add(make_request("turn-2", [*range(6), *answer, 1, 2, 3], 2))
    driver.run()
    # 14 of 15 tokens were computed: three pages are full.
    assert driver.num_cached["turn-2", 0] == 12


def test_nothing_is_shared_between_salts_or_without_caching() -> None:
    driver = Driver()
    for i, salt in enumerate(["", "x", "y", "x"]):
        driver.add(make_request(f"r{i}", range(33), 2, salt=salt))
        driver.run()
    assert [driver.num_cached[f"r{i}", 0] for i in range(4)] == [0, 0, 0, 32]
    plain = Driver(enable_prefix_caching=False)
    for i in range(2):
        plain.add(make_request(f"r{i}", range(33), 2))
        plain.run()
    assert plain.num_cached["r1", 0] == 0
    assert plain.scheduler.kv.pool.num_free == plain.limits.num_pages


def test_a_hit_lasts_while_its_first_user_still_runs() -> None:
    driver = Driver(make_limits(page_size=4), pipeline_depth=1)
    driver.add(make_request("a", range(17), 30))
    for _ in range(3):
        driver.step()
    driver.add(make_request("b", range(17), 3))
    driver.run()
    assert driver.num_cached["b", 0] == 16


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("num_prompt", "num_copies"), [(1, 0), (5, 0), (6, 2), (17, 0), (19, 2)])
def test_siblings_compute_one_prompt_and_copy_its_partial_page(
    caching: bool, depth: int, num_prompt: int, num_copies: int
) -> None:
    driver = Driver(make_limits(page_size=4), pipeline_depth=depth, enable_prefix_caching=caching)
    request = make_request("a", range(num_prompt), 6, n=3, seed=11)
    driver.add(request)
    driver.run()
    assert driver.worker.num_copies == num_copies
    assert driver.worker.num_computed == num_prompt + 2 + 3 * 5
    for idx in range(3):
        assert driver.outputs["a", idx] == solo_run(list(range(num_prompt)), request.sampling, idx, driver.limits)
        assert driver.num_cached["a", idx] == (num_prompt - 1 if idx else 0)


def test_a_sibling_computes_less_than_a_page_rather_than_wait() -> None:
    driver = Driver(make_limits(page_size=4), pipeline_depth=1)
    driver.add(make_request("a", range(4), 6, n=3))
    driver.run()
    assert len(driver.steps[0].plan.new_rows) == 3
    assert driver.worker.num_computed == 3 * (4 + 5)


def test_forks_share_the_full_pages_of_the_prompt() -> None:
    driver = Driver(make_limits(page_size=4), pipeline_depth=0, enable_prefix_caching=False)
    driver.add(make_request("a", range(11), 6, n=3))
    driver.step()
    driver.step()
    tables = [seq.page_ids for seq in driver.scheduler.requests["a"].running]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    copies = driver.steps[1].plan
    assert list(unpack_int32(copies.copy_src)) == [tables[0][2]] * 2
    assert list(unpack_int32(copies.copy_dst)) == [tables[1][2], tables[2][2]]


def test_siblings_of_single_tokens_share_through_the_cache() -> None:
    """Each sequence ends with the step that settles its prompt: there is nobody to fork from."""
    driver = Driver(make_limits(page_size=4), pipeline_depth=1)
    driver.add(make_request("a", range(18), 1, n=4))
    driver.run()
    assert driver.worker.num_computed == 18 + 3 * 2
    assert len(driver.steps) <= 3


def test_a_waiting_sibling_does_not_hold_up_others() -> None:
    driver = Driver(make_limits(max_num_batched_tokens=30), pipeline_depth=0)
    driver.add(make_request("a", range(20), 4, n=2))
    driver.add(make_request("b", range(100, 108), 4))
    step = driver.schedule()
    assert step is not None
    assert step.record is not None
    assert step.record.rows == [("a", 0, 20), ("b", 0, 8)]
    assert step.record.waiting == [("a", 1, "sibling's prompt: 0 of 20 tokens computed")]
    driver.run()


def settled(cache: PrefixCache, pool: PagePool, namespace: str, *tokens: int) -> list[int]:
    """Put a sequence of pages of one token each into the tree and end it."""
    node = cache.acquire(namespace, None)
    pages = pool.allocate(len(tokens))
    for token, page_id in zip(tokens, pages, strict=True):
        node = cache.extend(node, array("i", [token]).tobytes(), page_id)
    cache.release(node)
    pool.release(pages)
    return pages


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    pool = PagePool(16)
    cache = PrefixCache(pool, page_size=1)
    first = settled(cache, pool, "", 1, 2, 3)
    second = settled(cache, pool, "", 1, 5)  # its first page is the tree's already, and stays so
    third = settled(cache, pool, "salt", 1)
    assert pool.num_free == 16 - 5
    node, pages = cache.match("", array("i", [1, 2, 9]), 3)
    assert pages == first[:2]
    cache.release(cache.acquire("", node))  # 1 and 2 are the most recently used now
    order = []
    for _ in range(5):
        before = set(pool.free_page_ids())
        assert cache.evict(1) == 1
        order += list(set(pool.free_page_ids()) - before)
    assert order == [first[2], second[1], third[0], first[1], first[0]]
    assert cache.evict(1) == 0
    assert list(cache.nodes()) == []


def test_reuse_makes_a_leaf_young_again() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, page_size=1)
    first = settled(cache, pool, "", 1)
    second = settled(cache, pool, "", 2)
    node, _ = cache.match("", array("i", [1]), 1)
    cache.release(cache.acquire("", node))
    cache.evict(1)
    assert second[0] in pool.free_page_ids()
    assert first[0] not in pool.free_page_ids()


def test_what_is_in_use_is_never_evicted() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, page_size=1)
    pages = settled(cache, pool, "", 1, 2, 3, 4)
    node, hit = cache.match("", array("i", [1, 2]), 2)
    cursor = cache.acquire("", node)
    pool.share(hit)
    assert cache.num_evictable == 2
    assert cache.evict(8) == 2
    assert sorted(pool.free_page_ids()) == sorted({*range(8)} - set(pages[:2]))
    cache.release(cursor)
    pool.release(hit)
    assert cache.num_evictable == 2


def test_the_eviction_heap_does_not_grow_with_reuse() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, page_size=1)
    settled(cache, pool, "", 1, 2, 3)
    for _ in range(1000):
        node, _ = cache.match("", array("i", [1, 2, 3]), 3)
        cache.release(cache.acquire("", node))
    assert cache.heap_size <= 3


def test_the_pool_refuses_more_than_it_has() -> None:
    pool = PagePool(2)
    with pytest.raises(OutOfPagesError):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_reset_drops_what_nobody_uses() -> None:
    driver = Driver(make_limits(page_size=4), pipeline_depth=1)
    driver.add(make_request("done", range(100, 117), 3))
    driver.run()
    driver.add(make_request("a", range(17), 30))
    for _ in range(3):
        driver.step()
    num_cached = driver.scheduler.kv.pool.num_cached
    assert num_cached > 0
    assert driver.scheduler.reset_prefix_cache() == num_cached
    assert driver.scheduler.kv.pool.num_cached == 0
    driver.run()  # what was in use is unharmed
    assert driver.outputs["a", 0] == solo_run(list(range(17)), make_request("", [0], 30).sampling, 0, driver.limits)
    driver.add(make_request("again", range(100, 117), 3))
    driver.run()
    assert driver.num_cached["again", 0] == 0
    plain = Driver(enable_prefix_caching=False)
    assert plain.scheduler.reset_prefix_cache() == 0


def test_a_tier_hears_of_what_is_evicted() -> None:
    """A toy of a lower tier: it keeps the tokens of each prefix whose last page is about to be free."""
    driver = Driver(make_limits(num_pages=8, page_size=4, max_model_len=32))
    kept: list[list[int]] = []

    def keep(node: CacheNode) -> None:
        assert cache is not None
        assert node.page_id not in driver.scheduler.kv.pool.free_page_ids()
        path: list[bytes] = []
        walk: CacheNode | None = node
        while walk is not None and isinstance(walk.key, bytes):
            path.append(walk.key)
            walk = walk.parent
        kept.append(list(unpack_int32(b"".join(reversed(path)))))

    cache = driver.scheduler.kv.cache
    assert cache is not None
    cache.given_up = keep
    driver.add(make_request("old", range(300, 316), 1))
    driver.run()
    driver.add(make_request("a", range(8), 20))
    driver.run()
    assert kept == [list(range(300, 316)), list(range(300, 312)), list(range(300, 308))][: len(kept)]
    assert len(kept) >= 2
