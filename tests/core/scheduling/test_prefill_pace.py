"""Prompts beside streams: chunks as long as the device's pace allows, and never a bound where nobody waits."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.scheduling.scheduler import ScheduledStep
from penstock.ipc.codec import unpack_int32
from tests.core.driver import Driver, make_limits, make_request

LIMITS = make_limits(num_pages=200, page_size=64, max_num_batched_tokens=2048, max_model_len=8192)


class Paced(Driver):
    """A worker that takes so many microseconds for a token and for a step."""

    def __init__(self, us_per_token: int, us_per_step: int = 0, **options: Any) -> None:
        super().__init__(LIMITS, enable_prefix_caching=False, **options)
        self.us_per_token, self.us_per_step = us_per_token, us_per_step
        self.step_us: list[int] = []

    def execute(self) -> None:
        num_tokens = sum(unpack_int32(self.plans[0].num_new))
        super().execute()
        self.step_us.append(self.us_per_step + num_tokens * self.us_per_token)
        self.results[-1] = replace(self.results[-1], num_forward_us=self.step_us[-1])


def prompt(num_tokens: int) -> list[int]:
    return [i % LIMITS.vocab_size for i in range(num_tokens)]


def chunk_sizes(steps: list[ScheduledStep], name: str) -> list[int]:
    rows = [row for step in steps if step.record is not None for row in step.record.rows]
    return [size for request_id, _, size in rows if request_id == name]


def streaming(driver: Driver) -> None:
    """One request that streams to the end of the test."""
    driver.add(make_request("stream", range(100), max_tokens=2000))
    for _ in range(3):
        driver.step()


def test_a_long_prompt_alone_goes_in_as_large_chunks_as_fit() -> None:
    driver = Paced(1000)
    driver.add(make_request("a", prompt(5000), max_tokens=2))
    driver.run()
    assert chunk_sizes(driver.steps, "a")[:3] == [2048, 2048, 904]


def test_beside_a_stream_steps_keep_to_the_time() -> None:
    driver = Paced(1000, max_prefill_ms=250)
    streaming(driver)
    driver.add(make_request("b", prompt(5000), max_tokens=2))
    num_before = len(driver.step_us)
    while driver.scheduler.requests.get("b") is not None:
        driver.step()
    sizes = chunk_sizes(driver.steps, "b")
    assert sum(sizes) == 5001
    # At most two steps were planned before the first long one returned; then it settles about 250 tokens.
    assert sum(us > 320_000 for us in driver.step_us[num_before:]) <= 2
    assert all(190 <= size <= 315 for size in sizes[5:-2]), sizes
    assert driver.outputs[("b", 0)]


def test_a_fast_device_is_not_held_back_and_a_hiccup_is_forgotten() -> None:
    driver = Paced(10, max_prefill_ms=250)
    streaming(driver)
    driver.add(make_request("b", prompt(4000), max_tokens=2))
    while driver.scheduler.requests.get("b") is not None:
        driver.step()
    assert max(chunk_sizes(driver.steps, "b")) > 1000, "growing from the largest that has come back"
    driver.us_per_step = 5_000_000  # a stopped process, say
    driver.add(make_request("c", prompt(100), max_tokens=2))
    while driver.scheduler.requests.get("c") is not None:
        driver.step()
    driver.us_per_step = 0
    for name in ("d", "e"):
        driver.add(make_request(name, prompt(8000), max_tokens=2))
        while driver.scheduler.requests.get(name) is not None:
            driver.step()
    assert chunk_sizes(driver.steps, "d")[0] >= 16, "prompts go on at the least"
    assert max(chunk_sizes(driver.steps, "e")) > 1000


def test_without_a_bound_there_is_none() -> None:
    driver = Paced(1000, max_prefill_ms=0)
    streaming(driver)
    driver.add(make_request("b", prompt(4000), max_tokens=2))
    driver.run()
    assert chunk_sizes(driver.steps, "b")[0] == 2047


class Device(Paced):
    """A device as they are: a chunk is the dearer the further it stands in its prompt, and times vary."""

    def __init__(self, max_ms: int, noise: float, seed: int) -> None:
        super().__init__(0, max_prefill_ms=max_ms)
        self.rng = Random(seed)
        self.noise = noise
        self.mixed_us: list[int] = []

    def execute(self) -> None:
        plan = self.plans[0]
        chunks = list(zip(unpack_int32(plan.start), unpack_int32(plan.num_new), strict=True))
        super().execute()
        us = sum(40 + 200 * num_new + 0.1 * num_new * (start + num_new / 2) for start, num_new in chunks) + 3000
        us *= 1 + self.noise * self.rng.random()
        self.results[-1] = replace(self.results[-1], num_forward_us=int(us))
        if len(chunks) > 1 and max(num_new for _, num_new in chunks) > 1:
            self.mixed_us.append(int(us))


@pytest.mark.parametrize("max_ms", [20, 50, 250])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_steps_keep_to_the_time_however_far_their_chunks_stand_in_a_prompt(max_ms: int, noise: float) -> None:
    driver = Device(max_ms, noise, seed=max_ms)
    streaming(driver)
    for i in range(6):
        driver.add(make_request(f"{i}", prompt(6000), max_tokens=2))
        while driver.scheduler.requests.get(f"{i}") is not None:
            driver.step()
    within = sum(us <= 1.2 * max_ms * 1000 for us in driver.mixed_us) / len(driver.mixed_us)
    used = sum(driver.mixed_us) / len(driver.mixed_us) / (max_ms * 1000)
    assert within >= 0.95
    assert used > 0.7, "and most of the time is used"
    predicted = [step.record.predicted_us for step in driver.steps if step.record is not None]
    assert sum(us > 0 for us in predicted) > len(driver.mixed_us) // 2


def test_prompts_go_on_where_even_a_few_tokens_take_too_long() -> None:
    driver = Paced(20_000, max_prefill_ms=50)
    streaming(driver)
    driver.add(make_request("b", prompt(400), max_tokens=2))
    while driver.scheduler.requests.get("b") is not None:
        driver.step()
    assert set(chunk_sizes(driver.steps, "b")[3:-2]) <= {16, 17}
