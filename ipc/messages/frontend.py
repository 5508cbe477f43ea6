"""Between a frontend and the scheduler."""

from typing import Annotated, Literal

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
from penstock.ipc.messages.handover import KVSource, Role
from penstock.ipc.messages.images import ImageRef


class FrontendHello(Message, frozen=True):
    protocol_version: int
    name: ShortText
    model_fingerprint: ShortText
    wants_cache_events: bool = False  # it has other engines to choose from


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
    weights: str = ""  # as in the worker's hello, and so are the next ones
    arithmetic: str = ""
    is_batch_invariant: bool = False
    num_ranks: int = 1
    num_host_pages: int = 0
    failed_tiers: tuple[ShortText, ...] = ()
    role: Role = ""
    kv_sources: tuple[KVSource, ...] = ()  # by rank, if it has a role
    is_draining: bool = False  # it takes no new requests
    start_id: str = ""  # of the scheduler's process: another one after each start
    max_drafts: int = 0  # tokens that are guessed for a row in a step at most
    takes_images: bool = False


class EngineNotReady(Message, frozen=True):
    """No worker is serving now (starting, or lost); requests wait until EngineReady comes."""

    reason: str
    suspects: tuple[ShortText, ...] = ()  # ids of requests, of any frontend, of which one may have ended the worker
    is_draining: bool = False  # as in EngineReady


class NoteCulprit(Message, frozen=True):
    """A request was found to end workers of another engine: one like it is refused."""

    prompt_token_ids: Buffer
    sampling: SamplingParams


class DrainEngine(Message, frozen=True):
    """Take no new requests from now on, and tell all frontends, or take them again. There is no answer.

    The frontends take away the requests that other engines would have; the rest finish where they are.
    """

    is_draining: bool = True
    restarts: bool = False  # when nothing is left: end, to be started again


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
    weight: Annotated[float, Meta(gt=0)] = 1.0  # the tenant's share under the fair policy, relative to others
    ttft_left: Annotated[float, Meta(ge=0)] = 0.0  # seconds in which its first token is due; 0: no target
    tpot: Annotated[float, Meta(ge=0)] = 0.0  # seconds in which each token after the first is due; 0: no target
    prefill_at: Annotated[tuple[ShortText, ...], Meta(max_length=64)] = ()
    """Addresses of engines that may compute the prompt, the first choice first; empty: this one does."""
    handover_from: Annotated[int, Meta(ge=-1)] = -1
    """From another engine, for the KV of this prompt: it has the first so many tokens. -1: an ordinary request."""
    num_deaths: int = 0  # of workers of other engines that it may have ended, a few tokens ago
    is_background: bool = False  # nobody waits for it: it runs behind all others, whatever the policy
    images: Annotated[tuple[ImageRef, ...], Meta(max_length=1024)] = ()  # by position; no two overlap


class AbortRequest(Message, frozen=True):
    """Stop working on a request, or on one sequence of it. Idempotent; an unknown id is fine.

    For each live sequence that is aborted one last delta follows, with finish_reason "abort", no tokens and the bill;
    the frontend has already answered its client. It may come a few steps later.
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


class ListCache(Message, frozen=True):
    """Asks for all that is cached: a snapshot in `CacheEvents` follows. For a frontend that has missed some of them."""


class TierChanges(Struct, frozen=True, array_like=True, gc=False):
    """Pages that came to a tier, or left it. Who is told of one that he knows already, or not, ignores it."""

    gained: Buffer = b""  # uint64[k]: short keys of pages (`ipc/page_keys.py`)
    lost: Buffer = b""  # uint64[k]; none is in both


class CacheEvents(Message, frozen=True):
    """Which prefixes are cached; only for frontends that want it.

    Messages of changes have consecutive numbers. Whoever sees a gap asks for a snapshot. It comes in parts, with
    changes between them: each part says what is there when it is sent, and what happens after that is told as always.
    """

    number: int  # of the latest changes: these, or those told before this part of a snapshot
    device: TierChanges = TierChanges()
    host: TierChanges = TierChanges()
    part: Annotated[int, Meta(ge=-1)] = -1  # of a snapshot: 0 (forget all that was told before), 1, ...; -1: changes
    is_last: bool = False  # part of a snapshot
    page_size: int = 0  # tokens; this, and what follows, in part 0
    longest_usual_prompt: int = 0  # how the namespace of a prompt is found (`ipc/page_keys.py`)
    is_each_length_special: bool = False


CacheMiss = Literal["", "no_pages", "no_snapshot", "snapshot_evicted"]
"""Why a sequence did not start later in its prompt, where layers keep states (`core/kv/snapshots.py`)."""


class SequenceBill(Struct, frozen=True, array_like=True, gc=False):
    """What one sequence has cost; how it is counted is in `core/scheduling/accounts.py`."""

    queued_us: int = 0  # from its arrival to its first row, or to its end without one
    num_steps: int = 0  # that computed something for it
    device_us: float = 0.0  # its parts of their times
    kv_byte_seconds: float = 0.0  # bytes of its KV pages, over the time for which it held each of them
    num_saved_tokens: int = 0  # of the prompt, not computed: prefix cache, or a sibling's prompt
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # computed again: after a preemption, a pause, or a worker's death
    waited_for: str = ""  # why it had no row, if it waited for long
    num_guessed_tokens: int = 0
    num_accepted_tokens: int = 0  # of these: what they brought
    cache_miss: CacheMiss = ""


RequestState = Literal["", "running", "waiting", "paused"]


class ListRequests(Message, frozen=True):
    """Asks what requests are doing; `RequestList` answers. For people, not for every second."""

    number: int  # told in the answer
    most: Annotated[int, Meta(ge=1, le=1000)] = 100  # sequences in the answer
    state: RequestState = ""  # of these only; empty: of all
    request_id: ShortText = ""  # of those whose id contains it only


class SequenceStatus(Struct, frozen=True, array_like=True, gc=False):
    """What one live sequence is doing."""

    request_id: str
    sequence_idx: int
    state: RequestState
    reason: str  # why it waits, with figures
    tenant: str
    age: float  # seconds since it arrived; -1: it came from an earlier scheduler
    num_prompt_tokens: int
    num_output_tokens: int
    max_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_pages: int
    row: int  # -1: none
    num_preemptions: int


class RequestList(Message, frozen=True):
    """The sequences asked for: those that run, those that wait by their turns, those that are paused."""

    number: int
    sequences: tuple[SequenceStatus, ...]
    has_more: bool
    num_running: int  # sequences, of all
    num_waiting: int  # sequences
    num_paused: int  # requests


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
    late: str = ""  # likewise: why it could not meet its targets, if it was served behind others for that
    bill: SequenceBill | None = None  # in the last delta
    pooled: Buffer = b""  # fp32[k], if `pooling` asks for it: in the only delta, which has no tokens


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


class DiskStats(Struct, frozen=True, array_like=True, gc=False):
    """The disk tier's counters; all are zero without one."""

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
    is_writing: bool = False  # until a page cannot be written
    is_listed: bool = False  # what it held before is known


class HandoverStats(Struct, frozen=True, array_like=True, gc=False):
    """KV pages from and for other engines."""

    num_waiting: int = 0  # requests that wait for pages
    num_kept_pages: int = 0  # computed here, and not read yet
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
    is_on: bool  # false: it could not be set up, or has failed
    num_steps: int = 0  # from here on: totals since the start. For so many steps it was asked
    num_guessed: int = 0
    num_accepted: int = 0
    guessed_at: tuple[int, ...] = ()  # by position: the first guess of a row in a step, the second, ...
    accepted_at: tuple[int, ...] = ()
    acceptance: float = 0.0  # accepted / guessed, over the last steps with guesses
    draft_us: int = 0  # what guessing took
    saved_us: int = 0  # device time that the same tokens would have taken without, less what they took; an estimate


class HostTierStats(Struct, frozen=True, array_like=True, gc=False):
    """The host's pages, and what went there and back."""

    num_free_pages: int
    num_cached_pages: int  # found by their content
    num_held_pages: int  # of preempted sequences, or being moved
    num_demoted_pages: int  # from here on: totals since the start
    num_lost_pages: int  # evicted while no page of the host could be had
    num_promoted_pages: int
    num_swapped_out: int  # sequences
    num_swapped_in: int
    num_bytes_to_host: int
    num_bytes_from_host: int
    num_copy_us: int


class ImageStats(Struct, frozen=True, array_like=True, gc=False):
    """Embeddings of images."""

    num_embeddings: int  # images that the worker has embedded, or is to embed
    num_bytes: int  # of these
    max_bytes: int
    num_under_way: int  # of these, not ready
    num_waiting: int  # requests
    num_encoded: int  # from here on: totals since the scheduler's start
    num_found: int  # images that a request found embedded, or under way for another one
    num_encode_us: int


class LayerLoad(Struct, frozen=True, array_like=True, gc=False):
    """How many tokens went to each expert of a layer since the engine's start."""

    layer: int  # its number in the checkpoint
    tokens: tuple[int, ...]  # of each expert


class ExpertLoad(Message, frozen=True):
    """The tokens of all experts that are spread over ranks. Sent to all frontends every few seconds, if they change."""

    layers: tuple[LayerLoad, ...]


class SnapshotStats(Struct, frozen=True, array_like=True):
    """Copies of rows' states, where layers keep some."""

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
    num_recording_lines_lost: int = 0  # that could not be written, since the scheduler's start
    disk: DiskStats = DiskStats()
    host_tier: HostTierStats | None = None
    failed_tiers: tuple[ShortText, ...] = ()  # configured, but the current worker could not set them up
    device_us: int = 0  # total of the steps' times
    is_draining: bool = False
    num_prefill_tokens: int = 0  # known tokens of running sequences that are still to be computed
    expert_tokens: dict[str, int] = field(default_factory=dict)
    """Rank -> tokens that its experts have computed, each layer's."""
    expert_imbalance: dict[str, float] = field(default_factory=dict)
    """Layer -> tokens of the rank with the most, as a multiple of the mean: over the last minute or so."""
    page_size: int = 0  # tokens of a page
    handover: HandoverStats | None = None  # of an engine with a role
    drafts: DraftStats | None = None  # with --speculative-config
    images: ImageStats | None = None  # of a model that sees
    snapshots: SnapshotStats | None = None  # of a model whose layers keep states
