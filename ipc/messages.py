"""Every message that crosses a socket, and nothing else.

Structs are tagged, array-like and frozen; they are validated against these types on receipt.
Arrays travel as raw little-endian buffers (`bytes`), named with their dtype and shape in
the comment beside the field. A field is only ever added at the end and with a default, and a
change that breaks that raises `PROTOCOL_VERSION`.

Directions:

    frontend  -> scheduler   FrontendHello, AddRequest, AbortRequest, PauseRequest, ResumeRequest,
                             Heartbeat, Goodbye, ResetPrefixCache
    scheduler -> frontend    EngineReady, EngineNotReady, TokenBatch, EngineStats, SayHello, Refused, Heartbeat
    worker    -> scheduler   WorkerHello, StepResult, GrammarPrepared, WorkerFailed, Heartbeat
    scheduler -> worker      Welcome, StepPlan, PrepareGrammar, DropGrammar, SayHello, Refused, Heartbeat
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

PROTOCOL_VERSION = 3

Buffer = bytes
"""Raw little-endian numbers; the comment beside each field gives dtype and shape."""

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
ErrorCode = Literal["queue_full", "too_long", "internal", "grammar", "invalid_logits", "ends_workers", "queue_timeout"]
ShortText = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=1, le=2**26)]
"""How many there are of something that the scheduler keeps a list of: more than any machine has, and no more."""

_Ints = Annotated[tuple[int, ...], Meta(max_length=4096)]
_MAX_INT = 2**31 - 1


class Message(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of everything that is sent."""


# --- both directions ------------------------------------------------------------------------


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


# --- frontend <-> scheduler -----------------------------------------------------------------


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


class EngineNotReady(Message, frozen=True):
    """No worker serves now (starting, or lost); requests wait until EngineReady comes."""

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


class TokenLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities for k tokens in a row: each token itself first, then the n most likely ones, best first.

    They are of the model's own distribution: before temperature, penalties, biases and filters.
    """

    token_ids: Buffer  # int32[k, 1 + n]
    logprobs: Buffer  # fp32[k, 1 + n]
    ranks: Buffer  # int32[k]: 1 + how many tokens are likelier than the token itself


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
    """One token more, and nothing else, for each of k sequences."""

    request_ids: tuple[str, ...]
    sequence_idxs: Buffer  # int32[k]
    token_ids: Buffer  # int32[k]


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
    waiting_reasons: dict[str, int] = {}  # why sequences wait -> how many
    device_memory_used: int = 0  # bytes, as the present worker said last
    device_memory_total: int = 0
    waiting_tenants: tuple[WaitingTenant, ...] = ()  # those with something waiting
    max_turns: int = 0  # that may come before a newcomer's, else it is refused; 0: any number


# --- scheduler <-> worker -------------------------------------------------------------------


class WorkerHello(Message, frozen=True):
    """The model is loaded and the KV pool stands; plans may come."""

    protocol_version: int
    name: ShortText
    rank: int
    model_fingerprint: ShortText
    device: ShortText
    dtype: ShortText
    vocab_size: Count
    max_model_len: Count
    page_size: Count
    num_pages: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    pid: int = 0  # on its host; 0: not told


class Welcome(Message, frozen=True):
    """The scheduler takes this worker; the worker clears all rows."""

    protocol_version: int


class NewRow(Struct, frozen=True, array_like=True, gc=False):
    """All that a worker must know of a sequence that enters a row."""

    row: int
    token_ids: Buffer  # int32[num_known]: prompt, then outputs already returned (after a preemption)
    num_prompt_tokens: int
    sampling: SamplingParams  # seed is already the sequence's own
    page_ids: Buffer  # int32[k]: the pages it starts with: for all its known tokens, those of a prefix hit first
    grammar_id: int = 0  # of one that was prepared; 0: none. Its text is not in `sampling` any more


class PrepareGrammar(Message, frozen=True):
    """Make a grammar ready, beside the steps; `GrammarPrepared` answers. No row uses it before.

    The worker keeps it until it is dropped, or until the worker says hello again.
    """

    grammar_id: int  # never used twice
    grammar: str  # as in `SamplingParams`
    num_bytes: int = 0  # that it takes, about


class DropGrammar(Message, frozen=True):
    """No row will use this grammar any more; the worker may remember it for another one of the same text."""

    grammar_id: int


class StepPlan(Message, frozen=True):
    """One forward pass over one ragged batch.

    The worker applies, in this order: new_rows, page appends, page copies; then it runs the batch
    rows in the order given. Row `b` computes positions `start[b] .. start[b]+num_new[b]-1`; their
    token ids are in the row's token buffer, where the worker itself has put each token it sampled.
    If `samples[b]`, the logits of the chunk's last position give the row's next token.
    """

    step_id: int
    rows: Buffer  # int32[N]
    start: Buffer  # int32[N]: num_computed_tokens before this step
    num_new: Buffer  # int32[N]: chunk lengths, >= 1
    samples: Buffer  # uint8[N]
    new_rows: tuple[NewRow, ...] = ()
    page_rows: Buffer = b""  # int32[A]: rows (not new in this plan) that get pages
    page_counts: Buffer = b""  # int32[A]
    page_ids: Buffer = b""  # int32[sum(page_counts)]
    copy_src: Buffer = b""  # int32[C]: page copies, before the forward pass
    copy_dst: Buffer = b""  # int32[C]
    freed_rows: Buffer = b""  # int32[F]: rows that hold no sequence any more (may be new again here)


class RowError(Struct, frozen=True, array_like=True, gc=False):
    """No token could be drawn for one row: its sequence ends, all others go on."""

    sample_idx: int  # among the step's sampling rows
    reason: str
    code: ErrorCode = "grammar"


class StepResult(Message, frozen=True):
    """The tokens of one step, in the order of the plan's sampling rows; and the log-probabilities asked for.

    A: sampling rows with `num_logprobs >= 0`; B: over the rows with `prompt_logprobs >= 0`, the positions computed
    that are followed by a prompt token. Both in the order of the plan. W is one more than the largest number
    of best tokens that any of them asks for; a row that asks for n reads the first 1 + n columns.
    """

    step_id: int
    token_ids: Buffer  # int32[number of rows with samples == 1]
    num_forward_us: int = 0  # plan taken up -> tokens known
    num_idle_us: int = 0  # the device waited this long for the plan
    logprob_ids: Buffer = b""  # int32[A, W]: the drawn token, then the best ones
    logprobs: Buffer = b""  # fp32[A, W]
    logprob_ranks: Buffer = b""  # int32[A]
    prompt_logprob_ids: Buffer = b""  # int32[B, W]: the prompt's token, then the best ones
    prompt_logprobs: Buffer = b""  # fp32[B, W]
    prompt_logprob_ranks: Buffer = b""  # int32[B]
    row_errors: tuple[RowError, ...] = ()  # the tokens of these rows mean nothing


class GrammarPrepared(Message, frozen=True):
    """A grammar is ready for rows, or cannot be made ready."""

    grammar_id: int
    error: str = ""  # why not, for the client


class WorkerFailed(Message, frozen=True):
    """The worker cannot go on (out of memory, device error); it exits after this."""

    step_id: int
    reason: str
    is_out_of_memory: bool = False  # a smaller step may do


FromFrontend = (
    FrontendHello
    | AddRequest
    | AbortRequest
    | PauseRequest
    | ResumeRequest
    | Heartbeat
    | Goodbye
    | ResetPrefixCache
    | Probe
)
ToFrontend = EngineReady | EngineNotReady | TokenBatch | EngineStats | SayHello | Refused | Heartbeat
FromWorker = WorkerHello | StepResult | GrammarPrepared | WorkerFailed | Heartbeat
ToWorker = Welcome | StepPlan | PrepareGrammar | DropGrammar | SayHello | Refused | Heartbeat
