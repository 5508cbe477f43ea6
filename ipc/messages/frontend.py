"""Messages between a frontend and the scheduler."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from penstock.ipc.messages.base import (
    AnyAnswer,
    AnyQuestion,
    Buffer,
    ErrorCode,
    FinishReason,
    Message,
    SamplingParams,
    ShortText,
    TokenLogprobs,
)
from penstock.ipc.messages.handover import KVSource, Role
from penstock.ipc.messages.images import ImageRef


class FrontendHello(Message, frozen=True):
    protocol_version: int
    name: ShortText
    model_fingerprint: ShortText
    wants_cache_events: bool = False  # the frontend has several engines to choose from


class EngineReady(Message, frozen=True):
    """AnyAnswer to a hello once there is a worker; sent again to all frontends whenever a worker becomes ready."""

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
    weights: str = ""  # as in the worker's hello; so are the next fields
    arithmetic: str = ""
    is_batch_invariant: bool = False
    num_ranks: int = 1
    num_host_pages: int = 0
    failed_tiers: tuple[ShortText, ...] = ()
    role: Role = ""
    kv_sources: tuple[KVSource, ...] = ()  # by rank, if the engine has a role
    is_draining: bool = False  # it takes no new requests
    start_id: str = ""  # of the scheduler's process: different after each start
    max_drafts: int = 0  # most tokens guessed for a row in a step
    takes_images: bool = False


class EngineNotReady(Message, frozen=True):
    """No worker is serving now (starting, or lost); requests wait until EngineReady comes."""

    reason: str
    suspects: tuple[ShortText, ...] = ()  # request ids, of any frontend; one of them may have ended the worker
    is_draining: bool = False  # as in EngineReady


class NoteCulprit(Message, frozen=True):
    """A request has been found to end workers of another engine: refuse requests that are like it."""

    prompt_token_ids: Buffer
    sampling: SamplingParams


class DrainEngine(Message, frozen=True):
    """Stop taking new requests, or start again, and tell all frontends. There is no answer.

    The frontends move the requests that other engines can take; the rest finish where they are.
    """

    is_draining: bool = True
    restarts: bool = False  # when no requests are left, exit to be restarted


class SequenceProgress(Struct, frozen=True, array_like=True, gc=False):
    """How far an unfinished sequence got under an earlier scheduler."""

    sequence_idx: int
    token_ids: Buffer = b""  # int32[k]: output tokens that the frontend has, shown or held back: not sent again
    num_prompt_logprobs: int = 0  # prompt tokens after the first whose log-probabilities it has
    sampler_state: float | None = None  # of the delta with the last of these tokens


class Probe(Message, frozen=True):
    """Asks whether the scheduler answers: it sends EngineReady or EngineNotReady; no hello is needed."""


class AddRequest(Message, frozen=True):
    """A request with `n` sequences. The scheduler answers with deltas in TokenBatch until each has finished.

    Sequence `i` samples with seed `(sampling.seed + i) mod 2**63`, so sequence 0 equals an `n=1` request.

    With `progress`, the request began under an earlier scheduler. Each sequence in it continues after its given tokens,
    which count as outputs in every respect; sequences that are not in it have finished.
    """

    request_id: ShortText  # unique among the live requests of all frontends
    prompt_token_ids: Buffer  # int32[num_prompt_tokens]
    sampling: SamplingParams
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    priority: int = 0  # lower runs first under the priority policy
    cache_salt: ShortText = ""  # prefix cache entries are shared only among equal salts
    progress: tuple[SequenceProgress, ...] = ()  # by sequence_idx, each at most once; empty: a new request
    tenant: ShortText = ""  # whose request it is; tenants get rows in turns
    group: ShortText = ""  # requests made together; a tenant's groups get rows in turns; empty: a group of its own
    seconds_left: Annotated[float, Meta(ge=0)] = 0.0  # how much longer the client waits; 0: no limit. For policies
    weight: Annotated[float, Meta(gt=0)] = 1.0  # the tenant's share under the fair policy, relative to others
    ttft_left: Annotated[float, Meta(ge=0)] = 0.0  # seconds until its first token is due; 0: no target
    tpot: Annotated[float, Meta(ge=0)] = 0.0  # seconds for each token after the first; 0: no target
    prefill_at: Annotated[tuple[ShortText, ...], Meta(max_length=64)] = ()
    """Addresses of engines that may compute the prompt, in order of preference; empty: this engine does."""
    handover_from: Annotated[int, Meta(ge=-1)] = -1
    """Set by another engine that asks for this prompt's KV: how many of its first tokens it has. -1: not a handover."""
    num_deaths: int = 0  # of other engines' workers that it may have caused, a few tokens ago
    is_background: bool = False  # no client waits: it runs after all others, whatever the policy
    images: Annotated[tuple[ImageRef, ...], Meta(max_length=1024)] = ()  # by position; no two overlap
    adapter: ShortText = ""  # key of the adapter that changes the weights for it; empty: none


class AbortRequest(Message, frozen=True):
    """Stop working on a request, or on one sequence of it. Idempotent; an unknown id is fine.

    For each live sequence that is aborted, one last delta follows, with finish_reason "abort", no tokens and the bill.
    It may come a few steps later, when the frontend has already answered its client.
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


class ProfileSteps(Message, frozen=True):
    """Record the next steps in a trace file; 0 ends a recording. To the scheduler, and on to the workers: no answer."""

    num_steps: int


class ListCache(Message, frozen=True):
    """Asks for everything that is cached, after `CacheEvents` were missed; a snapshot in `CacheEvents` follows."""


class TierChanges(Struct, frozen=True, array_like=True, gc=False):
    """Pages that came to a tier, or left it. Receivers ignore gains that they know of, and losses that they do not."""

    gained: Buffer = b""  # uint64[k]: short keys of pages (`ipc/page_keys.py`)
    lost: Buffer = b""  # uint64[k]; no page is in both


class CacheEvents(Message, frozen=True):
    """Which prefixes are cached; only sent to frontends that want it.

    Messages with changes have consecutive numbers. A frontend that sees a gap asks for a snapshot. It comes in parts,
    with changes between them: each part says what is cached when it is sent, and later changes are sent as usual.
    """

    number: int  # of the latest changes: these, or the last ones sent before this part of a snapshot
    device: TierChanges = TierChanges()
    host: TierChanges = TierChanges()
    part: Annotated[int, Meta(ge=-1)] = -1  # of a snapshot: 0 (forget everything sent before), 1, ...; -1: changes
    is_last: bool = False  # part of a snapshot
    page_size: int = 0  # tokens; this field and the following ones are set in part 0
    longest_usual_prompt: int = 0  # how the namespace of a prompt is found (`ipc/page_keys.py`)
    is_each_length_special: bool = False


CacheMiss = Literal["", "no_pages", "no_snapshot", "snapshot_evicted"]
"""Why a sequence did not start later in its prompt, where layers keep states (`core/kv/snapshots.py`)."""


class SequenceBill(Struct, frozen=True, array_like=True, gc=False):
    """What one sequence has cost; `core/scheduling/accounts.py` says how it is counted."""

    queued_us: int = 0  # from its arrival to its first row, or to its end without one
    num_steps: int = 0  # steps that computed something for it
    device_us: float = 0.0  # its share of the times of these steps
    kv_byte_seconds: float = 0.0  # bytes of its KV pages, each times the seconds for which it held the page
    num_saved_tokens: int = 0  # prompt tokens not computed: prefix cache, or a sibling's prompt
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # computed again: after a preemption, a pause, or a worker's death
    waited_for: str = ""  # why it had no row, if it waited for long
    num_guessed_tokens: int = 0
    num_accepted_tokens: int = 0  # guesses that were right
    cache_miss: CacheMiss = ""


RequestState = Literal["", "running", "waiting", "paused"]


class ListRequests(AnyQuestion, frozen=True):
    """Asks what requests are doing; `RequestList` answers. Meant for people, not for polling every second."""

    most: Annotated[int, Meta(ge=1, le=1000)] = 100  # sequences in the answer
    state: RequestState = ""  # only sequences in this state; empty: all
    request_id: ShortText = ""  # only requests whose id contains it


class SequenceStatus(Struct, frozen=True, array_like=True, gc=False):
    """What one live sequence is doing."""

    request_id: str
    sequence_idx: int
    state: RequestState
    reason: str  # why it waits, with figures
    tenant: str
    age: float  # seconds since arrival; -1: it came from an earlier scheduler
    num_prompt_tokens: int
    num_output_tokens: int
    max_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_pages: int
    row: int  # -1: none
    num_preemptions: int


class RequestList(AnyAnswer, frozen=True):
    """The sequences asked for: first running ones, then waiting ones in the order of their turns, then paused ones."""

    sequences: tuple[SequenceStatus, ...]
    has_more: bool
    num_running: int  # all running sequences
    num_waiting: int  # sequences
    num_paused: int  # requests


class SequenceDelta(Struct, frozen=True, array_like=True, gc=False):
    """What one step produced for one sequence."""

    request_id: str
    sequence_idx: int
    token_ids: tuple[int, ...]  # usually one; includes a stop token; empty if there is only prompt_logprobs
    finish_reason: FinishReason | None = None  # set exactly once per sequence, in its last delta
    stop_token_id: int | None = None  # the token that ended it, if one did
    num_cached_tokens: int = (
        0  # in the first delta with a token: prompt tokens found in the prefix cache at the first admission
    )
    error: str = ""  # for finish_reason "error": one sentence with the limit and the value
    error_code: ErrorCode | None = None
    logprobs: TokenLogprobs | None = None  # of token_ids, if num_logprobs asks for them
    prompt_logprobs: TokenLogprobs | None = None  # of the next prompt tokens, in order; only for sequence 0
    queued_us: int = 0  # in the first delta with a token: microseconds from arrival to the first row
    late: str = ""  # likewise: why it could not meet its targets, if it was served after others because of that
    bill: SequenceBill | None = None  # in the last delta
    pooled: Buffer = b""  # fp32[k], if `pooling` asks for it: in the only delta, which has no tokens
    sampler_state: float | None = None  # what a sampler keeps after token_ids, for `SequenceProgress`


class TokenColumns(Struct, frozen=True, array_like=True, gc=False):
    """Further tokens, and nothing else, for each of k sequences."""

    request_ids: tuple[str, ...]
    sequence_idxs: Buffer  # int32[k]
    token_ids: Buffer  # int32[sum(num_tokens)]
    num_tokens: Buffer = b""  # int32[k], each >= 1; empty: one each


class TokenBatch(Message, frozen=True):
    """All that one step produced for one frontend's sequences; each sequence is in `deltas` or in `columns`."""

    step_id: int
    deltas: tuple[SequenceDelta, ...]  # sequences that begin or end, or have more to report than tokens
    columns: TokenColumns | None = None  # all others: most of them


class WaitingTenant(Struct, frozen=True, array_like=True, gc=False):
    """How much of one tenant's work waits."""

    tenant: str
    num_seqs: int
    num_groups: int


class DiskStats(Struct, frozen=True, array_like=True, gc=False):
    """The disk tier's counters; all zero without a disk tier."""

    num_places: int = 0  # for pages
    num_cached: int = 0  # places that hold a page
    num_moving: int = 0  # places being written or read
    num_to_write: int = 0  # pages that are to be written, or are being written
    num_waiting: int = 0  # requests that wait for pages
    num_stored: int = 0  # pages; from here on: totals since the start
    num_loaded: int = 0
    num_damaged: int = 0  # pages that could not be read
    num_failed: int = 0  # pages that could not be written
    num_given_up: int = 0  # requests that computed their prefix because the disk was slow
    is_writing: bool = False  # becomes false when a page cannot be written
    is_listed: bool = False  # its contents from before the start are known


class HandoverStats(Struct, frozen=True, array_like=True, gc=False):
    """KV pages from and for other engines."""

    num_waiting: int = 0  # requests that wait for pages
    num_kept_pages: int = 0  # computed here, but not read yet
    num_received_pages: int = 0  # from here on: totals since the start
    num_received_bytes: int = 0  # over all ranks
    num_sent_pages: int = 0
    num_received: int = 0  # prompts
    num_sent: int = 0
    num_failed: int = 0  # prompts that were computed here after all
    failed_transports: tuple[ShortText, ...] = ()


class DraftStats(Struct, frozen=True, array_like=True, gc=False):
    """Tokens that a drafter has guessed."""

    drafter: ShortText
    is_on: bool  # false: the drafter could not be set up, or has failed
    num_steps: int = 0  # steps in which the drafter was asked; from here on: totals since the start
    num_guessed: int = 0
    num_accepted: int = 0
    guessed_at: tuple[int, ...] = ()  # by position: the first guess of a row in a step, the second, ...
    accepted_at: tuple[int, ...] = ()
    acceptance: float = 0.0  # accepted / guessed, over the last steps with guesses
    draft_us: int = 0  # time spent on guessing
    saved_us: int = 0  # estimated device time saved: that of the same tokens without guesses, minus the time they took


class HostTierStats(Struct, frozen=True, array_like=True, gc=False):
    """The host's pages, and the traffic to and from them."""

    num_free_pages: int
    num_cached_pages: int  # found by their content
    num_held_pages: int  # of preempted sequences, or being moved
    num_demoted_pages: int  # from here on: totals since the start
    num_lost_pages: int  # evicted when no host page was available
    num_promoted_pages: int
    num_swapped_out: int  # sequences
    num_swapped_in: int
    num_bytes_to_host: int
    num_bytes_from_host: int
    num_copy_us: int


class ImageStats(Struct, frozen=True, array_like=True, gc=False):
    """Embeddings of images."""

    num_embeddings: int  # images that the worker has embedded or will embed
    num_bytes: int  # of these images' embeddings
    max_bytes: int
    num_under_way: int  # embeddings among them that are not ready
    num_waiting: int  # requests
    num_encoded: int  # from here on: totals since the scheduler's start
    num_found: int  # images that were embedded already, or under way for another request
    num_encode_us: int


class LayerLoad(Struct, frozen=True, array_like=True, gc=False):
    """How many tokens went to each expert of a layer since the engine's start."""

    layer: int  # its number in the checkpoint
    tokens: tuple[int, ...]  # of each expert


class ExpertLoad(Message, frozen=True):
    """The tokens of all experts that are spread over ranks. Sent to all frontends every few seconds if they change."""

    layers: tuple[LayerLoad, ...]


class SnapshotStats(Struct, frozen=True, array_like=True):
    """Copies of rows' states, if the model's layers keep states."""

    num_places: int
    num_used: int
    num_saved: int  # from here on: totals since the scheduler's start
    num_loaded: int
    num_evicted: int  # to make room
    misses: dict[str, float] = {}  # `CacheMiss` -> sequences that entered a row


class EngineStats(Message, frozen=True):
    """The scheduler's counters, for /metrics. Sent with heartbeats, and a few times a second while they change."""

    num_waiting: int
    num_running: int
    num_rows: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int  # owned only by the prefix cache
    num_used_pages: int  # in some running sequence's page table
    num_steps: int  # from here on: totals since the start
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    is_ready: bool
    num_waiting_tokens: int = 0
    drained_seqs_per_second: float = 0.0  # from the queue to rows, while there was a queue; 0: unknown, or none
    drained_tokens_per_second: float = 0.0  # the tokens of their prompts
    num_paused: int = 0  # requests
    num_dropped_from_frontends: int = 0  # malformed or invalid messages since the start, on the socket for frontends
    num_dropped_from_workers: int = 0  # on the socket for workers
    num_dropped_by_worker: int = 0  # on the current worker's own socket
    num_invalid_logits: int = 0  # sequences that ended because no token could be drawn from their logits
    num_log_lines_dropped: int = 0  # by the scheduler, since its start
    num_log_lines_dropped_by_worker: int = 0  # by the current worker
    num_dropped_tokens: int = 0  # total: sampled for sequences that had ended, or left their row, in the meantime
    num_page_slots: int = 0  # token positions in the pages of running sequences
    num_unfilled_slots: int = 0  # slots among them that are still empty
    waiting_reasons: dict[str, int] = field(default_factory=dict)  # why sequences wait -> how many
    device_memory_used: int = 0  # bytes, as the current worker last reported
    device_memory_total: int = 0
    waiting_tenants: tuple[WaitingTenant, ...] = ()  # tenants with something waiting
    max_turns: int = 0  # a new request is refused if more turns than this come before its own; 0: unlimited
    num_recording_lines_lost: int = 0  # recording lines that could not be written since the start
    disk: DiskStats = DiskStats()
    host_tier: HostTierStats | None = None
    failed_tiers: tuple[ShortText, ...] = ()  # configured tiers that the current worker could not set up
    device_us: int = 0  # total of the steps' times
    is_draining: bool = False
    num_prefill_tokens: int = 0  # known tokens of running sequences that are still to be computed
    expert_tokens: dict[str, int] = field(default_factory=dict)
    """Rank -> tokens that its experts have computed, added over all layers."""
    expert_imbalance: dict[str, float] = field(default_factory=dict)
    """Layer -> tokens of the busiest rank, as a multiple of the mean, over the last minute or so."""
    page_size: int = 0  # tokens of a page
    handover: HandoverStats | None = None  # of an engine with a role
    drafts: DraftStats | None = None  # with --speculative-config
    images: ImageStats | None = None  # of a model that takes images
    snapshots: SnapshotStats | None = None  # of a model whose layers keep states
