"""The host tier under the scheduler: evicted, found again, swapped out and in; whatever happens, the tokens are right.

The fake worker's memories hold tokens, so a page that was copied too early, too late or from somewhere else changes
every token after it.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, replace
from random import Random
from typing import Any

import pytest

from penstock.core.scheduling.invariants import check_invariants
from penstock.core.scheduling.scheduler import Scheduler
from penstock.core.sequences.limits import WorkerLimits
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import FROM_HOST, TO_HOST, AddRequest, StepResult
from penstock.parts.host.scheduler.host import Host
from penstock.parts.host.scheduler.tiers import TierTotals
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run
from tests.core.kv.test_window_pages import window_limits
from tests.core.scheduling.test_scheduler_traces import random_limits, random_requests, random_trace

KINDS = ("recompute", "swap", "auto")
NUM_SEEDS = 45


def totals_of(scheduler: Scheduler) -> TierTotals:
    """What its host tier has moved."""
    host = scheduler.parts.get(Host)
    assert host is not None
    return host.totals


def with_host(make: Callable[[Random], WorkerLimits]) -> Callable[[Random], WorkerLimits]:
    """A pool for little more than the longest sequence; hardly any host pages, some, or as many as ever needed."""

    def limits(rng: Random) -> WorkerLimits:
        made = make(rng)
        num_pages = made.num_pages
        while replace(made, num_pages=num_pages - 1).max_sequence_len == made.max_sequence_len:
            num_pages -= 1
        return replace(
            made,
            num_pages=num_pages + rng.randint(0, 3),
            max_num_seqs=max(4, made.max_num_seqs),
            max_num_batched_tokens=max(5, made.max_num_batched_tokens),
            num_host_pages=rng.choice([1, 3, made.num_pages // 2 + 1, 3 * made.num_pages, 500]),
        )

    return limits


def returning_requests(rng: Random, limits: WorkerLimits) -> deque[AddRequest]:
    """Random requests, then more that begin like these; outputs are long enough for preemptions."""
    requests = random_requests(rng, limits)
    for i in range(rng.randint(5, 20)):
        prompt = list(unpack_int32(rng.choice(requests).prompt_token_ids))
        end = rng.randint(1, len(prompt))
        more = [rng.randrange(limits.vocab_size) for _ in range(rng.randint(0, (limits.max_sequence_len - end) // 2))]
        prompt = (prompt[:end] + more)[: limits.max_sequence_len - 1]
        requests.append(make_request(f"more-{i}", prompt, rng.choice([2, 30, 100]), n=rng.choice([1, 1, 2]), seed=i))
    return requests


def tier_trace(seed: int) -> Driver:
    make = window_limits if seed % 3 == 2 else random_limits
    kind = KINDS[seed // 3 % 3]
    return random_trace(seed, with_host(make), make_requests=returning_requests, preemption=kind)


@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, 15))
def test_every_sequence_has_its_solo_output(first_seed: int) -> None:
    """Under aborts, deaths of workers and schedulers, and any lag between plans and results."""
    for seed in range(first_seed, first_seed + 15):
        try:
            tier_trace(seed)
        except BaseException as error:
            error.add_note(f"trace of seed {seed}")
            raise


def test_the_traces_reach_what_they_are_for() -> None:
    totals: Counter[str] = Counter()
    for seed in range(NUM_SEEDS, NUM_SEEDS + 27):
        totals.update(asdict(totals_of(tier_trace(seed).scheduler)))
    del totals["num_copy_us"]  # the fake worker has no clock
    assert min(totals.values()) > 5, totals


def run_alone(driver: Driver, request_id: str, prompt: list[int], max_tokens: int = 2) -> int:
    """Run one request to its end; return how many of its prompt's positions were not computed."""
    request = make_request(request_id, prompt, max_tokens)
    driver.add(request)
    driver.run()
    assert driver.outputs[request_id, 0] == solo_run(prompt, request.sampling, 0, driver.limits)
    return driver.num_cached[request_id, 0]


def test_an_evicted_prefix_comes_back_from_the_host() -> None:
    limits = make_limits(num_pages=12, num_host_pages=100)
    driver = Driver(limits)
    prompts = [[100 * i + j for j in range(32)] for i in range(5)]
    for i, prompt in enumerate(prompts):
        assert run_alone(driver, f"first-{i}", prompt) == 0
    num_computed = driver.worker.num_computed
    for i, prompt in enumerate(prompts):
        assert run_alone(driver, f"again-{i}", prompt) == 28
    assert driver.worker.num_computed - num_computed == 5 * (4 + 1)
    totals = totals_of(driver.scheduler)
    assert totals.num_promoted_pages == totals.num_pages_from_host == driver.worker.num_from_host > 0
    assert totals.num_demoted_pages == totals.num_pages_to_host == driver.worker.num_to_host
    assert totals.num_demoted_pages <= 5 * 8 + 5, "what the host has already is not copied there again"


def test_a_device_hit_goes_on_with_host_pages() -> None:
    """The first pages of a prefix are still on the device, the later ones are not."""
    driver = Driver(make_limits(num_pages=10, num_host_pages=100))
    prompt = list(range(32))
    run_alone(driver, "a", prompt)
    run_alone(driver, "b", [500 + i for i in range(16)])  # evicts the last pages of the prompt
    cache = driver.scheduler.kv.cache
    assert cache is not None
    num_on_device = len(cache.match("", array("i", prompt), 7)[1])
    assert 0 < num_on_device < 7
    before = driver.worker.num_from_host
    assert run_alone(driver, "c", [*prompt, 999]) == 32
    assert driver.worker.num_from_host - before == 8 - num_on_device


def test_the_least_recently_used_leave_the_host_first() -> None:
    driver = Driver(make_limits(num_pages=9, num_host_pages=16))
    prompts = [[100 * i + j for j in range(32)] for i in range(4)]
    for i, prompt in enumerate(prompts):
        run_alone(driver, f"first-{i}", prompt)
    assert run_alone(driver, "newest", prompts[3]) == 28
    assert run_alone(driver, "oldest", prompts[0]) == 0


def test_other_namespaces_find_nothing() -> None:
    driver = Driver(make_limits(num_pages=9, num_host_pages=100))
    prompt = list(range(32))
    run_alone(driver, "a", prompt)
    run_alone(driver, "b", [500 + i for i in range(32)])
    driver.add(make_request("c", prompt, 2, salt="other"))
    driver.run()
    assert driver.num_cached["c", 0] == 0


def test_a_reset_forgets_all_tiers() -> None:
    driver = Driver(make_limits(num_pages=12, num_host_pages=100))
    prompt = list(range(32))
    run_alone(driver, "a", prompt)
    run_alone(driver, "b", [500 + i for i in range(32)])
    num_to_host = driver.worker.num_to_host
    assert num_to_host
    assert driver.scheduler.reset_prefix_cache() > 0
    check_invariants(driver.scheduler)
    tiers = driver.scheduler.kv.tiers
    assert tiers is not None
    assert tiers.host.num_free == 100
    assert run_alone(driver, "c", prompt) == 0
    assert driver.worker.num_to_host == num_to_host, "what is dropped is not copied"


def crowded(preemption: str, *, num_host_pages: int = 200, **options: Any) -> Driver:
    """Four long sequences in a pool for less than two; all of them are preempted."""
    driver = Driver(make_limits(num_pages=24, num_host_pages=num_host_pages), preemption=preemption, **options)
    for i in range(4):
        driver.add(make_request(f"r{i}", [100 * i + j for j in range(30)], 50))
    return driver


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_swapped_sequence_computes_nothing_again(caching: bool, depth: int) -> None:
    driver = crowded("swap", enable_prefix_caching=caching, pipeline_depth=depth)
    driver.run()
    totals = totals_of(driver.scheduler)
    assert totals.num_swapped_in == totals.num_swapped_out == driver.scheduler.totals.num_preemptions > 0
    num_in_flight = driver.scheduler.totals.num_dropped_tokens
    assert driver.worker.num_computed <= 4 * 79 + num_in_flight + totals.num_swapped_in * depth
    for i in range(4):
        request = make_request(f"r{i}", [100 * i + j for j in range(30)], 50)
        expected = solo_run(list(unpack_int32(request.prompt_token_ids)), request.sampling, 0, driver.limits)
        assert driver.outputs[f"r{i}", 0] == expected
    recomputing = crowded("recompute", enable_prefix_caching=caching, pipeline_depth=depth)
    recomputing.run()
    assert recomputing.outputs == driver.outputs
    assert totals_of(recomputing.scheduler).num_swapped_out == 0
    if not caching:
        assert recomputing.worker.num_computed > driver.worker.num_computed


def test_without_room_on_the_host_it_is_computed_again() -> None:
    driver = crowded("swap", num_host_pages=2, enable_prefix_caching=False)
    driver.run()
    assert driver.scheduler.totals.num_preemptions > 0
    assert totals_of(driver.scheduler).num_swapped_out == 0
    assert len(driver.finished) == 4


def test_an_abort_gives_the_host_pages_back() -> None:
    driver = crowded("swap", enable_prefix_caching=False)
    tiers = driver.scheduler.kv.tiers
    assert tiers is not None
    while not tiers.swapped:
        driver.step()
    assert tiers.host.num_held > 0
    for seq in list(tiers.swapped):
        driver.abort(next(name for name in driver.added if driver.scheduler.requests[name] is seq.request))
    assert tiers.host.num_free == 200
    driver.run()


def test_a_dead_worker_takes_the_host_pages_with_it() -> None:
    driver = crowded("swap")
    while not totals_of(driver.scheduler).num_swapped_out:
        driver.step()
    driver.reset_worker()
    tiers = driver.scheduler.kv.tiers
    assert tiers is not None
    assert not tiers.swapped
    assert tiers.host.num_free == 200
    driver.run()
    assert len(driver.finished) == 4


def test_a_worker_without_the_tier_takes_over() -> None:
    """Its memory could not be had: streams go on without it."""
    driver = crowded("swap")
    while not totals_of(driver.scheduler).num_swapped_out:
        driver.step()
    driver.reset_worker(replace(driver.limits, num_host_pages=0))
    assert driver.scheduler.kv.tiers is None
    driver.run()
    assert len(driver.finished) == 4


def test_siblings_fork_and_swap() -> None:
    """Sequences of one prompt share pages; each that is swapped has its own copies, and still shares what is cached."""
    driver = Driver(make_limits(num_pages=20, num_host_pages=200), preemption="swap")
    request = make_request("r", list(range(30)), 40, n=4, seed=5)
    driver.add(request)
    driver.run()
    assert totals_of(driver.scheduler).num_swapped_in > 0
    assert driver.worker.num_copies > 0
    for idx in range(4):
        assert driver.outputs["r", idx] == solo_run(list(range(30)), request.sampling, idx, driver.limits)


@pytest.mark.parametrize(
    ("speed", "measured_us", "most"),
    [(10**9, 1, 100), (10, 1_000_000, 0), (10**9, 1_000_000, 1), (0, 1_000_000, 1)],
)
def test_auto_takes_what_costs_less(speed: int, measured_us: int, most: int) -> None:
    """By the speed of copies that the worker's hello tells, in bytes per second, and that steps show, for each page."""
    limits = make_limits(num_pages=24, num_host_pages=200)
    driver = Driver(replace(limits, host_copy_speed=speed), enable_prefix_caching=False, pipeline_depth=0)

    def execute() -> None:
        plan = driver.plans.popleft()
        num_pages = plan.copy_tiers.count(TO_HOST) + plan.copy_tiers.count(FROM_HOST)
        num_us = 1000 + 100 * sum(unpack_int32(plan.num_new))
        result = driver.worker.execute(plan)
        copied = num_pages, num_pages * measured_us
        driver.results.append(
            StepResult(plan.step_id, result.token_ids, num_us, num_copied_pages=copied[0], num_copy_us=copied[1])
        )

    driver.execute = execute  # type: ignore[method-assign]
    for i in range(6):  # the times of steps with prompts are known then
        driver.add(make_request(f"first-{i}", range(1, 5 * (i + 2)), 2))
        driver.run()
    for i in range(4):
        driver.add(make_request(f"r{i}", [100 * i + j for j in range(30)], 50))
    driver.run()
    num_preemptions = driver.scheduler.totals.num_preemptions
    assert num_preemptions > 2
    assert totals_of(driver.scheduler).num_swapped_out == min(most, num_preemptions)
