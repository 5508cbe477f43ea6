"""The disk tier under the scheduler: what is written, what is read again, by whom; the tokens are right in any case.

The fake worker's memories and the fake disk hold tokens, so a page that was written too early, or read into a host page
that somebody else has, changes every token after it.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

import msgspec
import pytest

import tests.core.driver
from penstock.core.scheduling import part
from penstock.core.sequences.limits import WorkerLimits
from penstock.parts.disk.messages import DiskContents
from penstock.parts.disk.scheduler import moves as disk_moves
from penstock.parts.disk.scheduler.disk_tier import DiskTier
from penstock.parts.disk.scheduler.moves import DiskMoves
from penstock.parts.host.scheduler.host import Host
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run
from tests.core.kv.test_window_pages import window_limits
from tests.core.scheduling.test_scheduler_traces import check_outputs, random_limits, random_trace
from tests.parts.host.test_host_moves import KINDS, returning_requests, with_host

NUM_SEEDS = 12


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of tests are short."""
    monkeypatch.setattr(disk_moves, "MIN_STORED_TOKENS", 8)


def with_disk(make: Callable[[Random], WorkerLimits]) -> Callable[[Random], WorkerLimits]:
    def limits(rng: Random) -> WorkerLimits:
        made = with_host(make)(rng)
        num_host_pages = max(2, made.num_host_pages)
        return replace(made, num_host_pages=num_host_pages, num_disk_places=rng.choice([1, 5, 30, 400]))

    return limits


def disk_trace(seed: int) -> Driver:
    make = window_limits if seed % 3 == 2 else random_limits
    kind = KINDS[seed // 3 % 3]
    driver = random_trace(seed, with_disk(make), make_requests=returning_requests, preemption=kind)
    return again(driver, Random(seed))


def again(driver: Driver, rng: Random) -> Driver:
    """Start afresh with the same disk, and the same requests."""
    driver.restart_scheduler()
    requests = [
        msgspec.structs.replace(request, request_id=f"again-{name}") for name, (request, _) in driver.added.items()
    ]
    while driver.can_move:
        driver.move()
    for request in requests:
        assert driver.add(request) is None
        for _ in range(rng.randint(0, 3)):
            driver.step()
    driver.run()
    check_outputs(driver, requests)
    return driver


@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, 6))
def test_every_sequence_has_its_solo_output(first_seed: int) -> None:
    """Under aborts, deaths of workers and schedulers, lost pages, failed writes, and any lag."""
    for seed in range(first_seed, first_seed + 6):
        try:
            disk_trace(seed)
        except BaseException as error:
            error.add_note(f"trace of seed {seed}")
            raise


def test_the_traces_reach_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.core.driver, "check_invariants", lambda scheduler: None)  # they take most of the time
    found = [0, 0, 0, 0]
    for seed in range(48):
        disk = disk_trace(seed).disk
        counts = (disk.num_stored, disk.num_loaded, disk.num_lost, disk.num_failed)
        found = [total + count for total, count in zip(found, counts, strict=True)]
    assert min(found) > 10, found


def settle(driver: Driver) -> None:
    """Let all that is to be written be written."""
    while driver.step():
        pass


def restarted(driver: Driver) -> DiskMoves:
    """Another scheduler and worker, which know what the disk holds."""
    driver.restart_scheduler()
    while driver.can_move:
        driver.move()
    disk = driver.scheduler.parts.get(DiskMoves)
    assert disk is not None
    return disk


def run_alone(driver: Driver, request_id: str, prompt: list[int], salt: str = "") -> int:
    """Run one request to its end; return how many of its prompt's positions were not computed."""
    request = make_request(request_id, prompt, 2, salt=salt)
    driver.add(request)
    settle(driver)
    assert driver.outputs[request_id, 0] == solo_run(prompt, request.sampling, 0, driver.limits)
    return driver.num_cached[request_id, 0]


def quiet(driver: Driver) -> Driver:
    """A driver whose disk loses nothing."""
    driver.disk.loss_rate = driver.disk.failure_rate = 0.0
    return driver


def test_a_restart_finds_the_prefix() -> None:
    driver = quiet(Driver(make_limits(num_host_pages=20, num_disk_places=50)))
    prompt = list(range(50))
    assert run_alone(driver, "first", prompt) == 0
    assert len(driver.disk.places) == 12, "all full pages, while there was nothing else to do"
    disk = restarted(driver)
    assert run_alone(driver, "again", prompt) == 48
    assert driver.worker.num_computed <= 2 + 1
    assert disk.totals.num_loaded_pages == 12
    restarted(driver)
    assert run_alone(driver, "after a death", prompt) == 48
    assert run_alone(driver, "other", prompt, salt="other") == 0
    restarted(driver)
    assert run_alone(driver, "a part", [*prompt[:30], 7, 7]) == 28
    assert driver.scheduler.reset_prefix_cache() > 0
    settle(driver)
    assert not driver.disk.places
    restarted(driver)
    assert run_alone(driver, "after a reset", prompt) == 0


def test_short_prefixes_are_written_once_they_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_moves, "MIN_STORED_TOKENS", 100)
    driver = quiet(Driver(make_limits(num_host_pages=20, num_disk_places=50)))
    prompt = list(range(32))
    run_alone(driver, "first", prompt)
    assert not driver.disk.places
    run_alone(driver, "second", [*prompt[:16], *range(500, 520)])
    assert len(driver.disk.places) == 4, "what both have in common"


def test_the_begin_of_a_path_is_overwritten_last() -> None:
    driver = quiet(Driver(make_limits(num_host_pages=20, num_disk_places=12)))
    prompts = [[100 * i + j for j in range(33)] for i in range(3)]
    for i, prompt in enumerate(prompts[:2]):
        run_alone(driver, f"first-{i}", prompt)
    restarted(driver)
    assert run_alone(driver, "newest", prompts[1]) == 32
    restarted(driver)
    assert run_alone(driver, "cut", prompts[0]) == 16


def test_more_answers_than_pages_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = DiskMoves._moved
    monkeypatch.setattr(
        DiskMoves, "_moved", lambda disk, message: moved(disk, msgspec.structs.replace(message, ok=message.ok + b"\1"))
    )
    driver = quiet(Driver(make_limits(num_host_pages=20, num_disk_places=50)))
    prompt = list(range(50))
    assert run_alone(driver, "first", prompt) == 0
    restarted(driver)
    assert run_alone(driver, "again", prompt) == 48


def test_a_slow_disk_is_not_waited_for() -> None:
    driver = quiet(Driver(make_limits(num_host_pages=20, num_disk_places=50)))
    prompt = list(range(50))
    run_alone(driver, "first", prompt)
    disk = restarted(driver)
    driver.add(make_request("again", prompt, 2))
    driver.add(make_request("other", [900, 901], 2))
    assert driver.schedule() is not None, "others go on"
    assert disk.wakes_at > driver.now
    driver.execute()
    driver.process()
    driver.now = disk.wakes_at
    while driver.plans or (driver.schedule() is not None):
        driver.execute()
        driver.process()
    assert driver.num_cached["again", 0] == 0
    assert disk.totals.num_given_up == 1
    settle(driver)
    driver.check_idle()
    assert run_alone(driver, "later", prompt) == 48


def test_a_request_is_not_held_any_more_once_the_worker_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other parts there are: the answer will not come."""
    monkeypatch.setattr(part, "brought", lambda file, base: (Host, DiskMoves))
    driver = quiet(Driver(make_limits(num_host_pages=20, num_disk_places=50)))
    prompt = list(range(50))
    run_alone(driver, "first", prompt)
    restarted(driver)
    driver.add(make_request("again", prompt, 2))
    assert driver.schedule() is None
    assert driver.scheduler.waiting.held()
    driver.scheduler.reset_worker()
    assert not driver.scheduler.waiting.held()
    assert driver.scheduler.schedule() is not None


def test_a_trial_is_waited_for_without_a_timer() -> None:
    """Meanwhile no step may run: a deadline that has passed must not wake the scheduler again and again."""
    driver = quiet(Driver(make_limits(num_host_pages=20, num_disk_places=50)))
    prompt = list(range(50))
    run_alone(driver, "first", prompt)
    disk, scheduler = restarted(driver), driver.scheduler
    scheduler.trials.suspect("g")
    driver.add(make_request("again", prompt, 2))
    driver.add(make_request("tried", [900, 901], 2, grammar="g"))
    assert driver.schedule() is None
    assert scheduler.is_on_trial
    driver.now = disk.wakes_at + 1.0
    assert driver.schedule() is None
    assert disk.wakes_at < driver.now
    assert scheduler.wakes_at == inf
    driver.run()
    assert disk.totals.num_given_up == 1
    assert {name for name, _ in driver.finished} >= {"again", "tried"}


def test_a_swapped_sequence_waits_for_no_disk() -> None:
    """It holds pages of the host, which what is read would need; it goes on where it was, even if the disk has more."""
    limits = make_limits(max_num_seqs=1, max_num_batched_tokens=8, num_host_pages=40, num_disk_places=50)
    driver = quiet(Driver(limits, pipeline_depth=0, scheduling_policy="priority", preemption="swap"))
    prompt = list(range(50))
    run_alone(driver, "first", prompt)
    driver.restart_scheduler()
    request = make_request("again", prompt, 2, priority=1)
    driver.add(request)
    for _ in range(2):  # it begins before the list of what the disk holds has come
        assert driver.schedule() is not None
        driver.execute()
        driver.process()
    while driver.can_move:
        driver.move()
    disk = driver.scheduler.parts.get(DiskMoves)
    assert disk is not None
    assert disk.disk.num_cached == 12
    driver.add(make_request("urgent", [900, 901], 1))
    while ("urgent", 0) not in driver.finished:
        driver.schedule()
        driver.execute()
        driver.process()
    assert driver.scheduler.kv.tiers is not None
    assert driver.scheduler.kv.tiers.swapped
    assert driver.schedule() is not None, "it returns at once"
    assert disk.wakes_at == inf
    settle(driver)
    assert driver.outputs["again", 0] == solo_run(prompt, request.sampling, 0, limits)


def test_the_patience_is_the_time_of_computing() -> None:
    driver = quiet(Driver(make_limits(num_host_pages=20, num_disk_places=50)))
    prompt = list(range(50))
    run_alone(driver, "first", prompt)
    for us_per_token, expected in ((0.0, 10.0), (1.0e5, 4.8), (500.0, 0.05)):
        disk = restarted(driver)
        disk._predict_us = lambda start, count, each=us_per_token: each * count  # type: ignore[misc]
        driver.add(make_request(f"again-{us_per_token}", prompt, 2))
        assert driver.schedule() is None
        assert disk.wakes_at - driver.now == pytest.approx(expected)
        (request,) = driver.scheduler.requests.values()
        num_pages, seconds = disk.awaited(request)
        assert num_pages == 12
        assert seconds == pytest.approx(expected)
        assert sum(driver.scheduler.stats().waiting_reasons.values()) == 1
        settle(driver)


def test_reading_must_be_quicker_than_computing() -> None:
    driver = quiet(Driver(make_limits(num_host_pages=20, num_disk_places=50)))
    prompt = list(range(50))
    run_alone(driver, "first", prompt)
    for us_per_token, expected in ((1.0, 0), (1000.0, 48)):
        restarted(driver)._predict_us = lambda start, count, each=us_per_token: each * count  # type: ignore[misc]
        assert run_alone(driver, f"again-{us_per_token}", prompt) == expected


def test_a_full_disk_ends_writing_only() -> None:
    driver = quiet(Driver(make_limits(num_host_pages=30, num_disk_places=50)))
    run_alone(driver, "first", list(range(50)))
    driver.disk.failure_rate = 1.0
    run_alone(driver, "second", list(range(100, 150)))
    disk = driver.scheduler.parts.get(DiskMoves)
    assert disk is not None
    assert not disk.is_writing
    assert disk.stats().num_failed == 12
    assert run_alone(driver, "third", list(range(200, 250))) == 0
    assert disk.stats().num_failed == 12, "nobody tries again"
    driver.scheduler.kv.drop_cached()
    assert run_alone(driver, "again", list(range(50))) == 48, "what is there is still read"


def test_an_aborted_request_leaves_its_pages_to_others() -> None:
    driver = quiet(Driver(make_limits(num_host_pages=20, num_disk_places=50)))
    prompt = list(range(50))
    run_alone(driver, "first", prompt)
    restarted(driver)
    driver.add(make_request("again", prompt, 2))
    assert driver.schedule() is None
    driver.abort("again")
    settle(driver)
    driver.check_idle()
    assert driver.scheduler.kv.tiers is not None
    assert driver.scheduler.kv.tiers.host.num_cached == 12
    assert run_alone(driver, "later", prompt) == 48


def test_places_that_must_stay_empty_are_not_used() -> None:
    tier = DiskTier(6)
    tier.list_held([(b"a", 1), (b"b", 2)])
    assert tier.begin_store(b"c") == 2 - 1, "the oldest is overwritten as long as nothing is known of the others"
    tier.end_list([0, 5, 1])
    assert tier.num_unusable == 2
    assert sorted(tier.places()["free"]) == [3, 4]
    assert DiskContents(b"", b"", is_last=True).unusable == b""


def test_places_that_are_freed_while_the_list_comes_are_used_later() -> None:
    tier = DiskTier(4)
    tier.list_held([(b"a", 0), (b"b", 1)])
    tier.begin_load(b"a")
    tier.end_move(b"a", is_there=False)  # it was damaged
    assert tier.drop_cached() == 1
    tier.end_list([3])
    assert sorted(tier.places()["free"]) == [0, 1, 2]
