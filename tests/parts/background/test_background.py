"""Work that nobody waits for: behind all others under every policy, and out of their way while it runs."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.parts.background.scheduler import Background
from penstock.parts.policies.scheduler.registry import POLICIES
from tests.core.driver import Driver, make_limits, make_request
from tests.core.scheduling.test_preemption import preempted
from tests.core.scheduling.test_yielding import PROMPT, check_outputs, steps_until


@pytest.mark.parametrize("policy", [*POLICIES])
def test_others_come_first_whatever_the_policy(policy: str) -> None:
    """A request that would come last under each policy comes before work in the background that would be first."""
    driver = Driver(make_limits(max_num_seqs=1, num_pages=512, max_model_len=256), scheduling_policy=policy)
    driver.add(make_request("first", PROMPT, 4, tenant="t"))
    for i in range(4):
        driver.add(
            make_request(f"back{i}", PROMPT, 1, priority=-9, seconds_left=600, tenant=f"b{i}", is_background=True)
        )
    driver.now = 3600.0
    driver.add(make_request("late", [5] * 60, 40, priority=9, tenant="t"))
    driver.run()
    assert [name for name, _ in driver.finished][:2] == ["first", "late"]
    check_outputs(driver)


@pytest.mark.parametrize("policy", [*POLICIES])
@pytest.mark.parametrize("depth", [0, 1])
def test_rows_and_pages_are_yielded(policy: str, depth: int) -> None:
    driver = Driver(
        make_limits(max_num_seqs=4, num_pages=48, max_model_len=128), scheduling_policy=policy, pipeline_depth=depth
    )
    for i in range(6):
        driver.add(make_request(f"back{i}", [i, *PROMPT], 40, is_background=True))
    for _ in range(10):
        driver.step()
    driver.add(make_request("chat", [99] * 100, 10))  # needs most pages
    assert steps_until(driver, "chat") <= depth + 6
    driver.run()
    assert next(iter(driver.finished))[0] == "chat"
    assert {name[:4] for name, _ in preempted(driver)} == {"back"}
    check_outputs(driver)


@pytest.mark.parametrize("batching", ["static", "dynamic", "length-aware"])
def test_rows_of_a_batch_are_not_yielded_to_those_that_must_wait_for_its_end(batching: str) -> None:
    driver = Driver(make_limits(max_num_seqs=1, num_pages=48, max_model_len=128), batching=batching)
    driver.add(make_request("back", PROMPT, 20, is_background=True))
    for _ in range(10):
        driver.step()
    driver.add(make_request("chat", [99, *PROMPT], 10))
    driver.run(200)
    assert [name for name, _ in driver.finished] == ["back", "chat"]
    assert not preempted(driver)
    check_outputs(driver)


def test_beside_others_it_computes_only_what_a_step_has_left() -> None:
    driver = Driver(make_limits(max_num_seqs=8, num_pages=512, max_model_len=256))
    for i in range(4):
        driver.add(make_request(f"back{i}", [i, *PROMPT], 100, is_background=True))
    for _ in range(6):
        driver.step()
    before = {name: len(tokens) for name, tokens in driver.outputs.items()}
    assert set(before) == {(f"back{i}", 0) for i in range(4)}
    driver.add(make_request("chat", [99, *PROMPT], 60))
    driver.add(make_request("back4", PROMPT, 5, is_background=True))
    while ("chat", 0) not in driver.finished:
        driver.step()
    grown = {name: len(driver.outputs[name]) - number for name, number in before.items()}
    assert max(grown.values()) <= 3  # what was in flight: no time is known to be left
    assert ("back4", 0) not in driver.outputs
    assert not preempted(driver)  # they keep their rows and pages, which nobody needed
    driver.run()
    assert len(driver.finished) == 6
    check_outputs(driver)


class TimedDriver(Driver):
    """Each step takes a millisecond, and a little for each token."""

    def execute(self) -> None:
        super().execute()
        result = self.results.pop()
        self.results.append(replace(result, num_forward_us=1000 + len(result.token_ids)))


@pytest.mark.parametrize("max_prefill_ms", [0, 250])
def test_beside_others_it_goes_on_once_times_are_known(max_prefill_ms: int) -> None:
    driver = TimedDriver(make_limits(max_num_seqs=8, num_pages=400, max_model_len=256), max_prefill_ms=max_prefill_ms)
    driver.add(make_request("back", PROMPT, 20, is_background=True))
    for i in range(200):
        if i % 5 == 0:
            driver.add(make_request(f"chat{i}", [i, *PROMPT], 20))
        driver.step()
    assert ("back", 0) in driver.finished
    driver.run()
    check_outputs(driver)


def test_nobody_is_refused_because_of_it() -> None:
    driver = Driver(make_limits(max_num_seqs=1, num_pages=512, max_model_len=256), max_num_queued_seqs=64)
    for i in range(20):
        driver.add(make_request(f"back{i}", [i, *PROMPT], 4, is_background=True))
    driver.scheduler.queue_bound.max_turns = 1
    assert driver.scheduler.waiting.tenants() == ()
    assert driver.add(make_request("chat", PROMPT, 4)) is None
    assert driver.add(make_request("chat2", PROMPT, 4)) is not None  # one other is before it
    driver.run()
    check_outputs(driver)


def test_what_a_step_has_left_is_a_tenth() -> None:
    driver = Driver(make_limits(max_num_seqs=64, num_pages=2048, max_model_len=256, max_num_batched_tokens=512))
    scheduler = driver.scheduler
    for i in range(20):
        driver.add(make_request(f"chat{i}", [i, *PROMPT], 100))
        driver.add(make_request(f"back{i}", [i, *PROMPT], 100, is_background=True))
    while len(scheduler.running.decodes) < 20:
        driver.step()
    time = scheduler.pace.step_time
    for number in range(1, 60):  # a millisecond, and 50 us for each row
        time.learn((1.0, number / 64, number * 9 / 65536, 16 / 256, 16 * 8 / 262144), 1000 + 50 * number + 16)
    assert time.is_known
    background = scheduler.parts.get(Background)
    assert background is not None
    background.planning()
    left = background.left_us
    assert left is not None
    assert 0 < left <= 0.1 * scheduler.pace.decodes_us(20, 20 * 20)
    driver.step()
    driver.run()
    check_outputs(driver)


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_gives_what_each_gives_alone(seed: int) -> None:
    draw = Random(seed)
    options: dict[str, Any] = {"scheduling_policy": draw.choice([*POLICIES]), "pipeline_depth": draw.randrange(3)}
    options["max_prefill_ms"] = draw.choice([0, 20])
    if draw.random() < 0.3:
        options["batching"] = "static"
    windows = [(4, 8)] if draw.random() < 0.3 else []
    driver = Driver(
        make_limits(num_pages=40, max_num_seqs=4, windows=windows), num_stages=1 + (seed % 4 == 0), **options
    )
    for number in range(30):
        driver.now += draw.random()
        prompt = [draw.randrange(50)] * draw.randrange(1, 40)
        driver.add(
            make_request(
                f"r{number}", prompt, draw.randrange(1, 30), n=draw.choice([1, 1, 2]), tenant=f"t{draw.randrange(3)}",
                priority=draw.randrange(3), is_background=draw.random() < 0.5,
            )
        )  # fmt: skip
        for _ in range(draw.randrange(6)):
            driver.step()
        if draw.random() < 0.1:
            driver.abort(f"r{draw.randrange(number + 1)}")
    driver.run()
    for name in driver.aborted:
        driver.outputs.pop(name, None)
    check_outputs(driver)
    assert len(driver.finished) + len(driver.aborted) == sum(request.n for request, _ in driver.added.values())
