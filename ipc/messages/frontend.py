"""Between a frontend and the scheduler."""

from typing import Annotated

from msgspec import Meta, Struct, field

from penstock.ipc.messages.base import (
    Buffer,
    ErrorCode,
    FinishReason,
    Message,
    SamplingParams,
    ShortText,
    TokenLogprobs,
)


class FrontendHello(Message, frozen=True):
    protocol_version: int
    name: ShortText
    model_fingerprint: ShortText


class EngineReady(Message, frozen=True):
    """Answer to a hello once a worker is there; sent again to all frontends whenever one becomes ready."""

    protocol_version: int
    model_fingerprint: str
    max_model_len: int  # prompt + output tokens of one sequence
    vocab_size: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    device: str = ""  # a readable name
    dtype: str = ""
    max_num_queued_seqs: int = 0  # 0: unknown
    max_num_queued_tokens: int = 0
    kernels: str = ""  # what computes the model: "native", "torch", "triton", "transformers"


class EngineNotReady(Message, frozen=True):
    """No worker is serving now (starting, or lost); requests wait until EngineReady comes."""

    reason: str


class SequenceProgress(Struct, frozen=True, array_like=True, gc=False):
    """How far an unfinished sequence had come under an earlier scheduler."""

    sequence_idx: int
    token_ids: Buffer = b""  # int32[k]: output tokens that the frontend has, shown or held back; not sent again
    num_prompt_logprobs: int = 0  # prompt tokens after the first whose log-probabilities it has


class Probe(Message, frozen=True):
    """Asks whether the scheduler answers: it sends EngineReady or EngineNotReady; no hello is needed."""


class AddRequest(Message, frozen=True):
    """A request with `n` sequences. The scheduler answers with deltas in TokenBatch until each has finished.

    Sequence `i` samples with seed `(sampling.seed + i) mod 2**63`, so sequence 0 equals an `n=1` request.

    With `progress`, the request was begun under an earlier scheduler: each sequence named continues after its given
    tokens, which count as outputs in every respect; sequences not named have finished.
    """

    request_id: ShortText  # unique among the live requests of all frontends
    prompt_token_ids: Buffer  # int32[num_prompt_tokens]
    sampling: SamplingParams
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    priority: int = 0  # lower runs first under the priority policy
    cache_salt: ShortText = ""  # prefix cache entries are shared only among equal salts
    progress: tuple[SequenceProgress, ...] = ()  # by sequence_idx, each at most once; empty: a new request
    tenant: ShortText = ""  # on whose behalf; tenants get rows in turns
    group: ShortText = ""  # requests that a client made at once; a tenant's groups get rows in turns; empty: on its own
    seconds_left: Annotated[float, Meta(ge=0)] = 0.0  # how much longer its client waits; 0: no limit. For policies


class AbortRequest(Message, frozen=True):
    """Stop working on a request, or on one sequence of it. Idempotent; an unknown id is fine.

    No delta follows for what is aborted: the frontend has already answered its client.
    """

    request_id: ShortText
    sequence_idx: int = -1  # -1: all sequences of the request


class PauseRequest(Message, frozen=True):
    """The client of a request reads too slowly: compute nothing for it, and give its rows and pages to others.

    Deltas already on their way still count. Idempotent; an unknown id is fine.
    """

    request_id: ShortText


class ResumeRequest(Message, frozen=True):
    """Continue a paused request after the last token that was sent. Idempotent; an unknown id is fine."""

    request_id: ShortText


class Goodbye(Message, frozen=True):
    """This frontend leaves; its remaining requests are aborted."""


class ResetPrefixCache(Message, frozen=True):
    """Drop all cached pages that no sequence uses. There is no answer."""


class SequenceDelta(Struct, frozen=True, array_like=True, gc=False):
    """What one step produced for one sequence."""

    request_id: str
    sequence_idx: int
    token_ids: tuple[int, ...]  # usually one; includes a stop token; empty if there is only prompt_logprobs
    finish_reason: FinishReason | None = None  # set exactly once per sequence, in its last delta
    stop_token_id: int | None = None  # the token that stopped it, if one did
    num_cached_tokens: int = (
        0  # in the first delta with a token: prompt tokens found in the prefix cache at the first admission
    )
    error: str = ""  # for finish_reason "error": one sentence with the limit and the value
    error_code: ErrorCode | None = None
    logprobs: TokenLogprobs | None = None  # of token_ids, if num_logprobs asks for them
    prompt_logprobs: TokenLogprobs | None = None  # of the next prompt tokens, in order; only for sequence 0
    queued_us: int = 0  # in the first delta with a token: microseconds from its arrival to its first row


class TokenColumns(Struct, frozen=True, array_like=True, gc=False):
    """More tokens, and nothing else, for each of k sequences."""

    request_ids: tuple[str, ...]
    sequence_idxs: Buffer  # int32[k]
    token_ids: Buffer  # int32[sum(num_tokens)]
    num_tokens: Buffer = b""  # int32[k], each >= 1; empty: one each


class TokenBatch(Message, frozen=True):
    """All that one step produced for the sequences of one frontend; each is in `deltas` or in `columns`."""

    step_id: int
    deltas: tuple[SequenceDelta, ...]  # sequences that begin or end, or have more to report than tokens
    columns: TokenColumns | None = None  # all others: most of them


class WaitingTenant(Struct, frozen=True, array_like=True, gc=False):
    """What one tenant has waiting."""

    tenant: str
    num_seqs: int
    num_groups: int


class EngineStats(Message, frozen=True):
    """The scheduler's counters, for /metrics. Sent with heartbeats, and a few times a second while they change."""

    num_waiting: int
    num_running: int
    num_rows: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int  # owned by the prefix cache only
    num_used_pages: int  # in some running sequence's page table
    num_steps: int  # from here on: totals since the start
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    is_ready: bool
    num_waiting_tokens: int = 0
    drained_seqs_per_second: float = 0.0  # from the queue to a row, while there was a queue; 0: unknown, or none
    drained_tokens_per_second: float = 0.0  # their prompts
    num_paused: int = 0  # requests
    num_dropped_from_frontends: int = 0  # malformed or invalid messages since the start, on the socket for frontends
    num_dropped_from_workers: int = 0  # on the socket for workers
    num_dropped_by_worker: int = 0  # on the current worker's own
    num_invalid_logits: int = 0  # sequences that ended because no token could be drawn from their logits
    num_log_lines_dropped: int = 0  # by the scheduler, since its start
    num_log_lines_dropped_by_worker: int = 0  # by the current one
    num_dropped_tokens: int = 0  # total: sampled for sequences that had ended, or left their row, in the meantime
    num_page_slots: int = 0  # token positions in the pages of running sequences
    num_unfilled_slots: int = 0  # of these, still empty
    waiting_reasons: dict[str, int] = field(default_factory=dict)  # why sequences wait -> how many
    device_memory_used: int = 0  # bytes, as the current worker last reported
    device_memory_total: int = 0
    waiting_tenants: tuple[WaitingTenant, ...] = ()  # those with something waiting
    max_turns: int = 0  # a new request with more turns before its own is refused; 0: unlimited
