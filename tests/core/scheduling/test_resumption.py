"""Requests that another scheduler began: they go on with the tokens that they would have had."""

import pytest
from msgspec.structs import replace

from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import SequenceProgress
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run

PROMPT = list(range(1, 12))


@pytest.mark.parametrize("num_known", [0, 1, 6, 19])
def test_it_goes_on_after_the_tokens_it_has(num_known: int) -> None:
    driver = Driver()
    request = make_request("a", PROMPT, 20, seed=3)
    expected = solo_run(PROMPT, request.sampling, 0, driver.limits)
    driver.outputs["a", 0] = expected[:num_known]
    resumed = SequenceProgress(0, pack_int32(expected[:num_known]))
    assert driver.add(replace(request, progress=(resumed,))) is None
    driver.run()
    assert driver.outputs["a", 0] == expected
    assert driver.finished["a", 0].finish_reason == "length"
    first = driver.steps[0].plan.new_rows[0]
    assert list(unpack_int32(first.token_ids)) == PROMPT + expected[:num_known]
    assert first.num_prompt_tokens == len(PROMPT)


def test_known_tokens_count_for_min_tokens() -> None:
    """A stop token that may come only after five outputs stops at the sixth, not five after the resumption."""
    driver = Driver()
    request = make_request("a", PROMPT, 60, min_tokens=5, stop=tuple(range(0, 1000, 2)))
    expected = solo_run(PROMPT, request.sampling, 0, driver.limits)
    assert 5 < len(expected) < 20
    driver.outputs["a", 0] = expected[:4]
    assert driver.add(replace(request, progress=(SequenceProgress(0, pack_int32(expected[:4])),))) is None
    driver.run()
    assert driver.outputs["a", 0] == expected
    assert driver.finished["a", 0].finish_reason == "stop"


def test_finished_sequences_are_left_out() -> None:
    driver = Driver()
    request = make_request("a", PROMPT, 10, n=3)
    expected = solo_run(PROMPT, request.sampling, 1, driver.limits)
    driver.outputs["a", 1] = expected[:2]
    assert driver.add(replace(request, progress=(SequenceProgress(1, pack_int32(expected[:2])),))) is None
    driver.run()
    assert driver.outputs == {("a", 1): expected}


def test_cached_tokens_are_told_once() -> None:
    """With the first output token; a sequence that had one already has been told."""
    driver = Driver()
    driver.add(make_request("warm", PROMPT, 1))
    driver.run()
    request = make_request("a", PROMPT, 10, n=2)
    known = solo_run(PROMPT, request.sampling, 0, driver.limits)[:3]
    driver.add(replace(request, progress=(SequenceProgress(0, pack_int32(known)), SequenceProgress(1))))
    driver.run()
    assert driver.num_cached["a", 0] == 0
    assert driver.num_cached["a", 1] > 0


def test_a_full_queue_does_not_drop_what_was_admitted() -> None:
    driver = Driver(max_num_queued_seqs=2)
    assert driver.add(make_request("new", PROMPT, n=2)) is None
    assert driver.add(make_request("late", PROMPT)) is not None
    assert driver.add(replace(make_request("old", PROMPT), progress=(SequenceProgress(0),))) is None
    driver.run()


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        ((SequenceProgress(2),), "sequence 2 is resumed"),
        ((SequenceProgress(-1),), "sequence -1 is resumed"),
        ((SequenceProgress(1), SequenceProgress(0)), "out of order"),
        ((SequenceProgress(0), SequenceProgress(0)), "out of order"),
        ((SequenceProgress(0, b"123"),), "3 bytes"),
        ((SequenceProgress(0, pack_int32([1000])),), "vocabulary of 1000"),
        ((SequenceProgress(0, pack_int32([-1])),), "token id -1"),
        ((SequenceProgress(0, pack_int32([1] * 8)),), "resumes at 19 tokens"),
        ((SequenceProgress(0, num_prompt_logprobs=11),), "11 of 11 prompt tokens"),
    ],
)
def test_what_cannot_be_resumed_is_refused(progress: tuple[SequenceProgress, ...], said: str) -> None:
    driver = Driver(make_limits())
    refusal = driver.add(replace(make_request("a", PROMPT, 8, n=2), progress=progress))
    assert refusal is not None
    assert said in refusal.reason
    driver.check_idle()
