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
    """Answer to a hello once a worker is there; sent again to all whenever it becomes true."""

    protocol_version: int
    model_fingerprint: str
    max_model_len: int  # prompt + output tokens of one sequence
    vocab_size: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    device: str = ""  # as people read it
    dtype: str = ""
    max_num_queued_seqs: int = 0  # 0: not told
    max_num_queued_tokens: int = 0
    kernels: str = ""  # what computes the model: "native", "torch", "triton", "transformers"


class EngineNotReady(Message, frozen=True):
    """No worker serves now (starting, or lost); requests wait until EngineReady comes."""

    reason: str


class SequenceProgress(Struct, frozen=True, array_like=True, gc=False):
    """How far an unfinished sequence had come under a scheduler that is gone."""

    sequence_idx: int
    token_ids: Buffer = b""  # int32[k]: the output tokens that the frontend has, shown or held back; not told again
    num_prompt_logprobs: int = 0  # prompt tokens after the first whose log-probabilities it has


class Probe(Message, frozen=True):
    """Whether the scheduler answers: EngineReady or EngineNotReady, to whoever asks, without a hello."""


class AddRequest(Message, frozen=True):
    """A request with `n` sequences. The scheduler answers with deltas in TokenBatch until each has finished.

    Sequence `i` samples with seed `(sampling.seed + i) mod 2**63`, so sequence 0 equals an `n=1` request.

    With `progress`, the request was begun elsewhere: the sequences named go on after the tokens given, which count as
    outputs in every respect; those not named have finished.
    """

    request_id: ShortText  # unique among the live requests of all frontends
    prompt_token_ids: Buffer  # int32[num_prompt_tokens]
    sampling: SamplingParams
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    priority: int = 0  # lower runs first under the priority policy
    cache_salt: ShortText = ""  # prefix cache entries are shared only among equal salts
    progress: tuple[SequenceProgress, ...] = ()  # by sequence_idx, each at most once; empty: nothing is known yet
    tenant: ShortText = ""  # on whose behalf; tenants get rows in turns
    group: ShortText = ""  # requests that a client made at once; groups of a tenant get rows in turns; empty: alone
    seconds_left: Annotated[float, Meta(ge=0)] = 0.0  # until its client waits no longer; 0: no limit. For policies


class AbortRequest(Message, frozen=True):
    """Stop working on a request, or on one sequence of it. Idempotent; an unknown id is fine.

    No delta follows for what is aborted: the sender has already answered its client.
    """

    request_id: ShortText
    sequence_idx: int = -1  # -1: all sequences of the request


class PauseRequest(Message, frozen=True):
    """The client of a request does not keep up: compute nothing of it, and give its rows and pages to others.

    Deltas that are under way still count. Idempotent; an unknown id is fine.
    """

    request_id: ShortText


class ResumeRequest(Message, frozen=True):
    """Go on with a paused request, after the last token that was told. Idempotent; an unknown id is fine."""

    request_id: ShortText


class Goodbye(Message, frozen=True):
    """This frontend leaves; its remaining requests are aborted."""


class ResetPrefixCache(Message, frozen=True):
    """Drop all cached pages that no sequence uses. Nothing is answered."""


class SequenceDelta(Struct, frozen=True, array_like=True, gc=False):
    """What one step brought for one sequence."""

    request_id: str
    sequence_idx: int
    token_ids: tuple[int, ...]  # usually one, a stop token is included; none if there is only prompt_logprobs
    finish_reason: FinishReason | None = None  # set exactly once per sequence, in its last delta
    stop_token_id: int | None = None  # the token that stopped it, if one did
    num_cached_tokens: int = (
        0  # in the first delta with a token: prompt tokens found in the prefix cache at the first admission
    )
    error: str = ""  # for finish_reason "error": one sentence with the limit and the value
    error_code: ErrorCode | None = None
    logprobs: TokenLogprobs | None = None  # of token_ids, if num_logprobs asks for them
    prompt_logprobs: TokenLogprobs | None = None  # the next prompt tokens', in order; only of sequence 0
    queued_us: int = 0  # in the first delta with a token: microseconds from its arrival to its first row


class TokenColumns(Struct, frozen=True, array_like=True, gc=False):
    """More tokens, and nothing else, for each of k sequences."""

    request_ids: tuple[str, ...]
    sequence_idxs: Buffer  # int32[k]
    token_ids: Buffer  # int32[sum(num_tokens)]
    num_tokens: Buffer = b""  # int32[k], each >= 1; empty: one each


class TokenBatch(Message, frozen=True):
    """All that one step brought for the sequences of one frontend; each is in `deltas` or in `columns`."""

    step_id: int
    deltas: tuple[SequenceDelta, ...]  # what is first or last, or has more to tell than a token
    columns: TokenColumns | None = None  # the others, which are most


class WaitingTenant(Struct, frozen=True, array_like=True, gc=False):
    """What waits of one tenant."""

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
    num_cached_pages: int  # owned by the prefix cache alone
    num_used_pages: int  # in some running sequence's page table
    num_steps: int  # totals since start from here on
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    is_ready: bool
    num_waiting_tokens: int = 0
    drained_seqs_per_second: float = 0.0  # from the queue to a row, while somebody waited; 0: not known, or none
    drained_tokens_per_second: float = 0.0  # their prompts
    num_paused: int = 0  # requests
    num_dropped_from_frontends: int = 0  # malformed or senseless messages since start, on the socket for frontends
    num_dropped_from_workers: int = 0  # on the socket for workers
    num_dropped_by_worker: int = 0  # on the present worker's own
    num_invalid_logits: int = 0  # sequences that ended because no token could be drawn from their logits
    num_log_lines_dropped: int = 0  # by the scheduler, since its start
    num_log_lines_dropped_by_worker: int = 0  # by the present one
    num_dropped_tokens: int = 0  # total: sampled for sequences that had ended, or left their row, meanwhile
    num_page_slots: int = 0  # token positions in the pages of running sequences
    num_unfilled_slots: int = 0  # of these, those that hold nothing yet
    waiting_reasons: dict[str, int] = field(default_factory=dict)  # why sequences wait -> how many
    device_memory_used: int = 0  # bytes, as the present worker said last
    device_memory_total: int = 0
    waiting_tenants: tuple[WaitingTenant, ...] = ()  # those with something waiting
    max_turns: int = 0  # that may come before a newcomer's, else it is refused; 0: any number
