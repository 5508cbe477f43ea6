"""What the messages to and from frontends and workers share."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

PROTOCOL_VERSION = 4

Buffer = bytes
"""Raw little-endian numbers; the comment beside each field gives dtype and shape."""

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
ErrorCode = Literal[
    "queue_full", "too_long", "internal", "grammar", "invalid_logits", "ends_workers", "queue_timeout", "late",
    "unattainable", "no_adapter",
]  # fmt: skip
PoolingKind = Literal["last", "mean", "cls", "max", "weighted_mean", "mean_sqrt_len"]
"""The hidden state of the last or the first position, or the mean or the largest numbers over all positions."""
PooledAs = Literal["vector", "classes", "tokens"]
"""An embedding; the logits of the model's classes; or the logits of some tokens."""

ShortText = Annotated[str, Meta(max_length=256)]
_Ints = Annotated[tuple[int, ...], Meta(max_length=4096)]
_MAX_INT = 2**31 - 1


class Message(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages."""


class AnyQuestion(Message, frozen=True):
    """A message that asks for one answer."""

    number: int  # repeated in the answer


class AnyAnswer(Message, frozen=True):
    """The answer to a question."""

    number: int  # the question's


class Heartbeat(Message, frozen=True):
    """Shows that the sender is alive. Sent by a side that has been silent for a while."""

    num_dropped: int = 0  # from a worker: invalid messages that it received since its start
    num_log_lines_dropped: int = 0  # from a worker, since its start
    device_memory_used: int = 0  # bytes: on a GPU by all its processes, on a CPU by the worker
    device_memory_total: int = 0


class SayHello(Message, frozen=True):
    """The scheduler does not know this peer (it was restarted, or took the peer for dead).

    The peer says hello again and treats all its work in progress here as lost: a worker forgets it, a frontend
    resubmits it with the output that it has so far.
    """

    is_broken: bool = False  # to a worker: its group has lost a rank, so the ranks must meet again


class Refused(Message, frozen=True):
    """The scheduler rejects a peer (wrong protocol, another model); the peer exits."""

    reason: str


class Pooling(Struct, frozen=True, array_like=True, gc=False):
    """Asks for a vector in place of a token, made from the sequence's hidden states after the last norm."""

    kind: PoolingKind
    size: Annotated[int, Meta(ge=0, le=2**24)] = 0  # only its first numbers are returned; 0: all
    is_normalized: bool = True  # divide it by its Euclidean length, after it is cut to `size`
    returns: PooledAs = "vector"  # classes and tokens are neither cut nor normalized
    token_ids: _Ints = ()  # those whose logits are returned
    second_from: Annotated[int, Meta(ge=0, le=_MAX_INT)] = 0  # where the second text of a pair begins; 0: there is none


class SamplerUse(Struct, frozen=True, array_like=True, gc=False):
    """A sampler beyond those of the kernels, with its numbers (`config/samplers.py`); or a logits processor."""

    name: ShortText
    values: Annotated[tuple[float, ...], Meta(max_length=4096)] = ()
    arguments: Annotated[str, Meta(max_length=65536)] = ""  # a processor's, as a JSON object; empty: a sampler


class SamplingParams(Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """How one sequence is computed, with neutral defaults. The frontend makes it from a request it has validated.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1.0` mean "off".
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=_MAX_INT)] = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0  # always set; the frontend draws one if the user gives none
    min_tokens: Annotated[int, Meta(ge=0, le=_MAX_INT)] = 0
    stop_token_ids: _Ints = ()  # includes the model's EOS ids unless ignore_eos is set
    logit_bias: Annotated[tuple[tuple[int, float], ...], Meta(max_length=4096)] = ()  # (token id, added to its logit)
    num_logprobs: Annotated[int, Meta(ge=-1, le=1024)] = -1  # for each output token and the n best ones; -1: none
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=1024)] = -1  # likewise for each prompt token except the first
    allowed_token_ids: _Ints = ()  # only these are sampled; empty: any
    max_tokens: Annotated[int, Meta(ge=1, le=_MAX_INT)]
    bad_words: Annotated[
        tuple[Annotated[tuple[int, ...], Meta(min_length=1, max_length=4096)], ...], Meta(max_length=1024)
    ] = ()  # sequences of output tokens that must never be completed
    grammar: str = ""  # what the output must match, in llguidance's syntax; checked by the frontend; empty: anything
    grammar_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 0  # memory that the prepared grammar takes
    max_drafts: Annotated[int, Meta(ge=-1, le=64)] = -1  # most tokens guessed in a step; -1: as many as pay
    pooling: Pooling | None = None  # a vector comes in place of the first token, nothing is sampled; max_tokens is 1
    samplers: Annotated[tuple[SamplerUse, ...], Meta(max_length=256)] = ()  # in this order, before the draw


class TokenLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities for k tokens in a row: each token itself first, then the n most likely ones, best first.

    They describe the model's own distribution, before temperature, penalties, biases and filters.
    """

    token_ids: Buffer  # int32[k, 1 + n]
    logprobs: Buffer  # fp32[k, 1 + n]
    ranks: Buffer  # int32[k]: 1 + how many tokens are more likely than the token itself
