"""What the messages of both links share."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

PROTOCOL_VERSION = 4

Buffer = bytes
"""Raw little-endian numbers; the comment beside each field gives dtype and shape."""

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
ErrorCode = Literal["queue_full", "too_long", "internal", "grammar", "invalid_logits", "ends_workers", "queue_timeout"]
ShortText = Annotated[str, Meta(max_length=256)]
_Ints = Annotated[tuple[int, ...], Meta(max_length=4096)]
_MAX_INT = 2**31 - 1


class Message(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of everything that is sent."""


class Heartbeat(Message, frozen=True):
    """Nothing to say, still here. Sent by a side that has been silent for a while."""

    num_dropped: int = 0  # a worker's: what came to it since its start and was no message
    num_log_lines_dropped: int = 0  # a worker's, since its start
    device_memory_used: int = 0  # bytes: on a GPU by all its processes, on a CPU by the worker
    device_memory_total: int = 0


class SayHello(Message, frozen=True):
    """The scheduler does not know this peer (it was restarted, or took the peer for gone).

    The peer says hello again and takes everything it had under way here for lost: a worker forgets it,
    a frontend submits it again with what it has of it.
    """


class Refused(Message, frozen=True):
    """The scheduler turns a peer away (wrong protocol, another model); the peer exits."""

    reason: str


class Sampling(Struct, frozen=True, array_like=True, gc=False):
    """How one sequence's tokens are drawn, as far as its client alone says. Validated by the frontend.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1.0` mean "off".
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=_MAX_INT)] = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # always set; the frontend draws one if the user gave none
    min_tokens: Annotated[int, Meta(ge=0, le=_MAX_INT)] = 0
    stop_token_ids: _Ints = ()  # the model's EOS ids are in here unless ignore_eos was asked
    logit_bias: Annotated[tuple[tuple[int, float], ...], Meta(max_length=4096)] = ()  # (token id, added to its logit)
    num_logprobs: Annotated[int, Meta(ge=-1, le=1024)] = -1  # of each output token and of so many best ones; -1: none
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=1024)] = -1  # the same of each prompt token but the first
    allowed_token_ids: _Ints = ()  # nothing else is drawn; empty: anything


class SamplingParams(Sampling, frozen=True, array_like=True, gc=False, kw_only=True):
    """The same, with what takes the prompt, the tokenizer or the grammar library: how one sequence is computed."""

    max_tokens: Annotated[int, Meta(ge=1, le=_MAX_INT)]
    bad_words: Annotated[
        tuple[Annotated[tuple[int, ...], Meta(min_length=1, max_length=4096)], ...], Meta(max_length=1024)
    ] = ()  # sequences of output tokens that are never completed
    grammar: str = ""  # what the output must match, as llguidance reads it; checked by the frontend; empty: anything
    grammar_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 0  # of memory that the grammar takes, made ready


class TokenLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities for k tokens in a row: each token itself first, then the n most likely ones, best first.

    They are of the model's own distribution: before temperature, penalties, biases and filters.
    """

    token_ids: Buffer  # int32[k, 1 + n]
    logprobs: Buffer  # fp32[k, 1 + n]
    ranks: Buffer  # int32[k]: 1 + how many tokens are likelier than the token itself
