"""Prompts beside streams: chunks as long as the device's pace allows, and never a bound where nobody waits."""

from msgspec.structs import replace

from penstock.core.scheduler import ScheduledStep
from penstock.ipc.int32_buffer import unpack_int32
from tests.core.driver import Driver, make_limits, make_request

LIMITS = make_limits(num_pages=200, page_size=64, max_num_batched_tokens=2048, max_model_len=8192)


class Paced(Driver):
    """A worker that takes so many microseconds for a token and for a step."""

    def __init__(self, us_per_token: int, us_per_step: int = 0, **options: object) -> None:
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
    assert chunk_sizes(driver.steps, "b")[0] == 2047
    driver.us_per_step = 5_000_000  # a stopped process, say
    driver.add(make_request("c", prompt(100), max_tokens=2))
    while driver.scheduler.requests.get("c") is not None:
        driver.step()
    driver.us_per_step = 0
    for name in ("d", "e"):
        driver.add(make_request(name, prompt(8000), max_tokens=2))
        while driver.scheduler.requests.get(name) is not None:
            driver.step()
    assert chunk_sizes(driver.steps, "d")[0] == 16, "prompts go on at the least"
    assert max(chunk_sizes(driver.steps, "e")) > 1000


def test_without_a_bound_there_is_none() -> None:
    driver = Paced(1000, max_prefill_ms=0)
    streaming(driver)
    driver.add(make_request("b", prompt(4000), max_tokens=2))
    driver.run()
    assert chunk_sizes(driver.steps, "b")[0] == 2047
