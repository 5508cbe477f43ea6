"""Log-probabilities: told once each and in order, whatever happens; nothing of them for who did not ask."""

import pytest
from msgspec.structs import replace

from penstock.core.scheduling.scheduler import UnexpectedResultError
from penstock.ipc.messages import AddRequest, StepResult
from tests.core.driver import Driver, make_limits, make_request
from tests.core.scheduling.test_scheduler_traces import check_logprobs

PROMPT = list(range(100, 141))


def run(driver: Driver, *requests: AddRequest) -> None:
    for request in requests:
        assert driver.add(request) is None
    driver.run()
    for request in requests:
        for idx in range(request.n):
            check_logprobs(driver, request, idx)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [3, 64])
def test_chunks_and_depths(depth: int, budget: int) -> None:
    driver = Driver(make_limits(max_num_batched_tokens=budget, max_num_seqs=3), pipeline_depth=depth)
    run(
        driver,
        make_request("a", PROMPT, 5, num_logprobs=2, prompt_logprobs=1),
        make_request("b", PROMPT[:1], 4, num_logprobs=0, prompt_logprobs=0),
        make_request("c", PROMPT[5:], 4),
    )
    assert len(driver.prompt_logprobs["a", 0]) == len(PROMPT) - 1
    assert ("b", 0) not in driver.prompt_logprobs
    assert ("c", 0) not in driver.logprobs


def test_a_cached_prompt_is_computed_again_for_its_logprobs_only() -> None:
    driver = Driver()
    run(driver, make_request("a", PROMPT, 2))
    run(driver, make_request("b", PROMPT, 2, num_logprobs=1))
    assert driver.num_cached["b", 0] == 40
    run(driver, make_request("c", PROMPT, 2, prompt_logprobs=1))
    assert driver.num_cached["c", 0] == 0


def test_one_sequence_tells_the_prompts() -> None:
    """The others share its prompt, as ever."""
    driver = Driver(pipeline_depth=1)
    request = make_request("a", PROMPT, 6, n=3, num_logprobs=0, prompt_logprobs=0)
    run(driver, request)
    assert driver.prompt_logprobs.keys() == {("a", 0)}
    assert driver.worker.num_computed < 2 * len(PROMPT)


@pytest.mark.parametrize("num_steps", range(1, 14))
@pytest.mark.parametrize("cached", [False, True])
def test_a_worker_lost_in_the_middle(num_steps: int, cached: bool) -> None:
    """Part of the prompt's are told before, the rest after; with a cache of the new worker's or without."""
    driver = Driver(make_limits(max_num_batched_tokens=7), pipeline_depth=1, enable_prefix_caching=cached)
    request = make_request("a", PROMPT, 6, num_logprobs=1, prompt_logprobs=2)
    driver.add(request)
    for _ in range(num_steps):
        driver.step()
    if driver.scheduler.has_work:
        driver.reset_worker()
    driver.run()
    check_logprobs(driver, request, 0)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preempted_in_the_middle_of_the_prompt(depth: int) -> None:
    """What the cache holds of it is used as far as it was told, and no further."""
    driver = Driver(make_limits(num_pages=18, max_num_batched_tokens=2, max_num_seqs=2), pipeline_depth=depth)
    run(
        driver,
        make_request("first", range(8), 30, num_logprobs=0),
        make_request("asks", PROMPT, 6, num_logprobs=1, prompt_logprobs=1),
    )
    assert driver.scheduler.totals.num_preemptions == 1
    again = [admitted for step in driver.steps if step.record for admitted in step.record.admitted][-1]
    assert again.request_id == "asks"
    assert 0 < again.num_reused_tokens < len(PROMPT) - 1


def test_results_of_the_wrong_size_are_refused_and_change_nothing() -> None:
    driver = Driver(pipeline_depth=0)
    request = make_request("a", PROMPT, 3, num_logprobs=2, prompt_logprobs=1)
    driver.add(request)
    driver.schedule()
    driver.execute()
    good: StepResult = driver.results[0]
    wrong = [
        replace(good, logprob_ids=b""),
        replace(good, logprob_ranks=b""),
        replace(good, logprob_ids=good.logprob_ids[:8], logprobs=good.logprobs[:8]),
        replace(good, prompt_logprobs=good.prompt_logprobs[:-4]),
        replace(good, prompt_logprob_ids=b"", prompt_logprobs=b"", prompt_logprob_ranks=b""),
        replace(good, prompt_logprob_ranks=good.prompt_logprob_ranks + bytes(4)),
    ]
    for result in wrong:
        with pytest.raises(UnexpectedResultError, match="log-probabilities"):
            driver.scheduler.process(result)
    driver.run()
    check_logprobs(driver, request, 0)
