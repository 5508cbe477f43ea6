"""Texts that become vectors lengthen the steps of streams only a little; other prompts may take the usual time."""

from math import inf

import pytest
from msgspec.structs import replace

from penstock.core.steps.prefill_pace import parts_of
from penstock.ipc.messages import AddRequest, Pooling
from penstock.parts.pooling.scheduler import TextsBesideStreams
from tests.core.driver import Driver, make_limits, make_request

STEP_US = 1000.0


def pooled(name: str) -> AddRequest:
    request = make_request(name, [5] * 40, 1)
    return replace(request, sampling=replace(request.sampling, pooling=Pooling("last")))


@pytest.fixture
def driver() -> Driver:
    """One stream runs, and the time of its steps is known."""
    driver = Driver(make_limits(max_num_seqs=2, num_pages=64, max_model_len=128))
    driver.add(make_request("stream", [7] * 9, 90))
    for _ in range(4):
        driver.step()
    assert len(driver.scheduler.running.decodes) == 1
    for _ in range(60):
        driver.scheduler.pace.step_time.learn(parts_of(1, 12, []), STEP_US)
        driver.scheduler.pace.step_time.learn(parts_of(1, 12, [(0, 100)]), 2 * STEP_US)
    return driver


def longest(driver: Driver) -> float:
    part = driver.scheduler.parts.get(TextsBesideStreams)
    assert part is not None
    return part.longest_step_us


def test_texts_alone_are_bounded(driver: Driver) -> None:
    assert longest(driver) == inf
    driver.add(pooled("text"))
    assert longest(driver) == pytest.approx(1.2 * STEP_US, rel=0.1)
    room = driver.scheduler.pace.room(512, [12], longest(driver))
    assert room.tokens_from(0) <= 40 < driver.scheduler.pace.room(512, [12]).tokens_from(0)
    driver.abort("text")
    assert longest(driver) == inf


def test_a_prompt_that_somebody_waits_for_is_not(driver: Driver) -> None:
    driver.add(make_request("chat", [9] * 40, 4))
    driver.add(pooled("text"))
    assert longest(driver) == inf
