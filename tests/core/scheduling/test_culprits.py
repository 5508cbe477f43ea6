"""What is remembered of requests that ended workers, and how long."""

from msgspec.structs import replace

from penstock.core.scheduling.suspects import _MAX_REMEMBERED, _SECONDS, Culprits
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import SamplingParams

SAMPLING = SamplingParams(max_tokens=5, seed=7, top_k=3)


def test_the_same_prompt_and_parameters_are_known_for_a_while() -> None:
    culprits, prompt = Culprits(), pack_int32([1, 2, 3])
    assert not culprits.knows(prompt, SAMPLING, 0.0)
    culprits.note([1, 2, 3], SAMPLING, 0.0)
    assert culprits.knows(prompt, replace(SAMPLING, seed=8), _SECONDS - 1)
    assert not culprits.knows(pack_int32([1, 2, 4]), SAMPLING, 1.0)
    assert not culprits.knows(prompt, replace(SAMPLING, top_k=4), 1.0)
    assert not culprits.knows(prompt, SAMPLING, _SECONDS)


def test_one_that_did_it_again_is_known_for_longer_and_there_are_not_too_many() -> None:
    culprits = Culprits()
    culprits.note([0], SAMPLING, 0.0)
    culprits.note([1], SAMPLING, 1.0)
    culprits.note([0], SAMPLING, 2.0)
    assert culprits.knows(pack_int32([0]), SAMPLING, _SECONDS + 1.5)
    assert not culprits.knows(pack_int32([1]), SAMPLING, _SECONDS + 1.5)
    for token in range(2, 2 + _MAX_REMEMBERED):
        culprits.note([token], SAMPLING, 3.0)
    assert not culprits.knows(pack_int32([0]), SAMPLING, 3.0)
    assert culprits.knows(pack_int32([2]), SAMPLING, 3.0)
