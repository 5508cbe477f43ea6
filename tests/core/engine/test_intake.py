"""What a frontend of ours never asks for, and what would end a worker or the scheduler: refused on arrival."""

import math

import msgspec
import pytest

from penstock.config.parts import with_parts
from penstock.ipc.codec import Codec, MalformedMessage, pack_int32
from penstock.ipc.messages import AddRequest, FromFrontend, FromWorker, SamplingParams, SequenceProgress, WorkerHello
from tests.core.driver import Driver, make_request

VOCAB_SIZE = 1000  # the driver's
TOKENS = pack_int32([5, 6])
FINE = SamplingParams(max_tokens=4)


def sampling(**changes: object) -> AddRequest:
    return AddRequest("a", TOKENS, msgspec.structs.replace(FINE, **changes))


REFUSED = [
    sampling(temperature=math.nan),
    sampling(top_p=math.inf),
    sampling(presence_penalty=-math.inf),
    sampling(logit_bias=((5, math.nan),)),
    sampling(logit_bias=((VOCAB_SIZE, 1.0),)),
    sampling(logit_bias=((-1, 1.0),)),
    sampling(bad_words=((5, VOCAB_SIZE),)),
    sampling(allowed_token_ids=(1 << 40,)),
    sampling(min_tokens=2, stop_token_ids=(VOCAB_SIZE,)),
    sampling(num_logprobs=VOCAB_SIZE + 1),
    AddRequest("a", b"", FINE),
    AddRequest("a", b"\x01", FINE),
    AddRequest("a", pack_int32([VOCAB_SIZE]), FINE),
    AddRequest("a", pack_int32([-1]), FINE),
    AddRequest("a", TOKENS * 1000, FINE),
    AddRequest("a", TOKENS, FINE, progress=(SequenceProgress(1 << 40),)),
]


@pytest.mark.parametrize("message", REFUSED, ids=range(len(REFUSED)))
def test_a_request_that_cannot_be_computed(message: AddRequest) -> None:
    driver = Driver()
    assert driver.add(message) is not None
    assert not driver.scheduler.has_work


def test_stop_tokens_that_are_only_compared_may_be_any() -> None:
    driver = Driver()
    assert driver.add(sampling(stop_token_ids=(VOCAB_SIZE + 5,))) is None
    driver.run()
    assert len(driver.outputs["a", 0]) == 4


MALFORMED = [
    sampling(max_tokens=1 << 40),
    sampling(max_tokens=0),
    sampling(top_k=1 << 40),
    sampling(temperature=-1.0),
    sampling(repetition_penalty=0.0),
    sampling(min_tokens=1 << 62),
    sampling(bad_words=((),)),
    sampling(stop_token_ids=(1,) * 5000),
    make_request("a", [1], n=10**9),
    make_request("x" * 1000, [1]),
]


@pytest.mark.parametrize("message", MALFORMED, ids=range(len(MALFORMED)))
def test_values_outside_their_types_are_no_message(message: AddRequest) -> None:
    codec: Codec[FromFrontend] = Codec(FromFrontend)
    with pytest.raises(MalformedMessage):
        codec.decode(codec.encode(message))


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("value", [0, -1, 1 << 60])
def test_a_worker_of_absurd_size_is_no_message(position: int, value: int) -> None:
    sizes = [100, 64, 4, 64, 8, 32]
    sizes[position] = value
    codec: Codec[FromWorker] = Codec(with_parts(FromWorker, "FROM_WORKER"))
    with pytest.raises(MalformedMessage):
        codec.decode(codec.encode(WorkerHello(1, "w", 0, "m", "cpu", "float32", *sizes)))  # type: ignore[arg-type]
