"""Messages between the scheduler and a worker: steps, and what surrounds them."""

from typing import Annotated

from msgspec import Meta, Struct

from penstock.ipc.messages.base import Buffer, ErrorCode, Message, SamplingParams, ShortText
from penstock.ipc.messages.handover import KVSource
from penstock.ipc.messages.images import RowImage

Count = Annotated[int, Meta(ge=1, le=2**26)]
"""The length of a list that the scheduler keeps; the limit is far above what any machine has."""

ON_DEVICE, TO_HOST, FROM_HOST = 0, 1, 2
"""Where a copy's source and target are: both on the device, or one on the host."""


class WindowGroup(Struct, frozen=True, array_like=True, gc=False):
    """Layers that need keys and values only within a window: position p sees positions in (p - window, p].

    Their pages are as large as all others and come from the same pool, but have page tables of their own.
    """

    page_size: Count  # tokens per page, a power of two
    window: Count


class WorkerHello(Message, frozen=True):
    """The model is loaded and the KV pool is allocated; plans may come."""

    protocol_version: int
    name: ShortText
    rank: Annotated[int, Meta(ge=0)]  # in the group
    model_fingerprint: ShortText
    device: ShortText
    dtype: ShortText
    vocab_size: Count
    max_model_len: Count
    page_size: Count
    num_pages: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    pid: int = 0  # on its host; 0: unknown
    num_ranks: Count = 1  # workers that together hold the model
    window_groups: tuple[WindowGroup, ...] = ()  # page groups 1, 2, ...; group 0 keeps all, in pages of `page_size`
    longest_usual_prompt: Annotated[int, Meta(ge=0)] = 0
    """Longer prompts treat positions differently, so they share no pages with shorter ones. 0: no difference."""
    is_each_length_special: bool = False  # beyond it, pages are shared only by prompts of the same length
    kernels: ShortText = ""  # what computes the model: "native", "torch", "triton", "transformers"
    num_host_pages: Annotated[int, Meta(ge=0, le=2**26)] = 0  # pages of the host tier, numbered from 0
    page_bytes: Annotated[int, Meta(ge=0)] = 0  # of any group's page, on the device and on the host; 0: unknown
    host_copy_speed: Annotated[int, Meta(ge=0)] = 0  # bytes per second between device and host; 0: unknown
    failed_tiers: tuple[ShortText, ...] = ()  # configured tiers that could not be set up: "host", "disk"
    num_disk_places: Annotated[int, Meta(ge=0, le=2**24)] = 0  # places for pages on the disk; `DiskContents` follow
    weights: ShortText = ""  # a checksum over all bytes of the weights; "dummy" or "none" if there are none
    arithmetic: ShortText = ""  # the software and processor that compute, as far as they affect rounding
    answers: bool = True  # whether this rank sends the group's results; one rank does
    kv_sources: tuple[KVSource, ...] = ()  # how others read its pages; empty without --role. For a group: of all ranks
    was_welcomed: bool = False  # the group was complete already, under this or an earlier scheduler
    is_batch_invariant: bool = False  # a token's bits are the same in any batch or chunk, and when recomputed
    placement: ShortText = ""  # a checksum of which ranks hold which experts; empty: experts are not spread
    num_stages: Count = 1  # stages of the ranks' pipeline
    max_drafts: Annotated[int, Meta(ge=0, le=64)] = 0  # most tokens guessed for a row in a step; 0: none
    drafter: ShortText = ""  # the drafter's name, even if it could not be set up
    draft_page_bytes: Annotated[int, Meta(ge=0)] = 0  # that the drafter keeps on the device for each page
    max_embedding_bytes: Annotated[int, Meta(ge=0)] = 0  # of all images at a time; 0: the model takes none
    embedding_bytes: Annotated[int, Meta(ge=0)] = 0  # of one position of an image
    images_are_whole: bool = False  # an image's positions are computed in one chunk, because they see each other
    num_snapshots: Annotated[int, Meta(ge=0, le=2**26)] = 0  # places for copies of rows' states, numbered from 0
    state_bytes: Annotated[int, Meta(ge=0)] = 0  # of a row's state over all layers; 0: no layer keeps one
    texts_are_whole: bool = False  # a text's positions are computed in one chunk, because they all see each other


class Welcome(Message, frozen=True):
    """The scheduler accepts this worker; the worker clears all rows."""

    protocol_version: int
    epoch: int = 0  # the same for all workers of a group; larger than at any earlier welcome


class NewRow(Struct, frozen=True, array_like=True, gc=False):
    """Everything that a worker must know about a sequence that enters a row.

    Whatever a row keeps for its whole life is sent here, once. Anything else of that kind is a new field at the end,
    with a default that means none.
    """

    row: int
    token_ids: Buffer  # int32[num_known]: prompt, then outputs already returned (after a preemption)
    num_prompt_tokens: int
    sampling: SamplingParams  # the seed is already the sequence's own
    page_ids: Buffer  # int32[k]: its first pages, enough for all known tokens; those of a prefix hit come first
    grammar_id: int = 0  # a prepared grammar; 0: none. Its text is no longer in `sampling`
    cache_salt: ShortText = ""  # what is learnt from the sequence may be used only for others with the same salt
    images: tuple[RowImage, ...] = ()  # of its prompt, by position
    adapter_id: int = 0  # a prepared adapter; 0: none
    sampler_state: float | None = None  # what a sampler has kept of its outputs; None: it has none, or keeps nothing


class StepPlan(Message, frozen=True):
    """One forward pass over one ragged batch.

    The worker applies, in this order: freed rows, new rows, new pages, page copies; then it runs the batch rows in the
    order given. Row `b` computes positions `start[b] .. start[b]+num_new[b]-1`. Their token ids are in the row's token
    buffer, where the worker itself puts each token that it samples. If `samples[b]`, the logits of the chunk's last
    position yield the row's next token.

    Pooling. A row whose parameters have `pooling` yields a vector instead of its first token. It still has a token in
    all columns, which has no meaning.

    Drafts. With k = `num_drafts[b]` > 0, the worker may guess up to k tokens that follow the row's last one. They are
    the last of the new positions; if it guesses fewer, it computes fewer. The row's last token and each guess yield a
    token, sampled as it would be without guesses. The first one counts; each of the others counts if all guesses before
    it were right. A worker may return fewer of them, or none at all. Without drafts, a sampling row returns one token.

    Starts. Before the result of a step with drafts, only the worker knows where the row continues: one position after
    those whose tokens it returned. A plan made before the result says so in `start_bounds`; its `start` is an upper
    bound, and there are pages for `num_new` positions from there.

    A row's chunk needs the tokens of the last plan with that row, and of no other plan, so plans without a common row
    may overlap, as in the stages of a pipeline.

    Copies. They take effect one after the other, in the order of the columns: a page may be a target and then a source,
    or be copied away and then be a target. Copies between tiers move whole pages, of any page group, between the
    device's pool and the host's.

    States. In layers that keep a state of each row, saves come first: each copies a row's state, as earlier plans left
    it, to a snapshot. Then new rows get the state before any token. Loads follow: a row's state becomes the snapshot's.
    All of this happens before the forward pass.
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
    freed_rows: Buffer = b""  # int32[F]: rows that no longer hold a sequence (the plan may fill them again)
    window_pages: Buffer = b""  # int32[W, 4]: page group >= 1, row, index in the row's page table of this group, page
    num_drafts: Buffer = b""  # int32[N]: how many of each row's new tokens may be guesses; empty: none
    start_bounds: Buffer = b""  # uint8[N]: 1 where `start` is an upper bound; empty: all are exact
    copy_tiers: Buffer = b""  # uint8[C]: ON_DEVICE, TO_HOST or FROM_HOST for each copy; empty: all are on the device
    state_loads: Buffer = b""  # int32[L, 2]: row, snapshot with which it begins; before the forward pass
    state_saves: Buffer = b""  # int32[S, 2]: row, snapshot that its state becomes; before new rows and loads


class RowError(Struct, frozen=True, array_like=True, gc=False):
    """No token could be sampled for one row: its sequence ends, all others go on."""

    sample_idx: int  # among the step's sampling rows
    reason: str
    code: ErrorCode = "grammar"


class StepResult(Message, frozen=True):
    """The tokens of one step, in the order of the plan's sampling rows, and the log-probabilities asked for.

    S: sampling rows; A: tokens of rows with `num_logprobs >= 0`; B: positions computed that are followed by a prompt
    token, over the rows with `prompt_logprobs >= 0`. All are in plan order. W is one more than the largest number of
    best tokens that any row asks for; a row that asks for n reads the first 1 + n columns.
    """

    step_id: int
    token_ids: Buffer  # int32[sum(num_tokens)]
    num_forward_us: int = 0  # from reading the plan until the tokens are known
    num_idle_us: int = 0  # how long the device waited for the plan
    logprob_ids: Buffer = b""  # int32[A, W]: the sampled token, then the best ones
    logprobs: Buffer = b""  # fp32[A, W]
    logprob_ranks: Buffer = b""  # int32[A]
    prompt_logprob_ids: Buffer = b""  # int32[B, W]: the prompt's token, then the best ones
    prompt_logprobs: Buffer = b""  # fp32[B, W]
    prompt_logprob_ranks: Buffer = b""  # int32[B]
    row_errors: tuple[RowError, ...] = ()  # the tokens of these rows are invalid
    num_tokens: Buffer = b""  # int32[S]: how many tokens each sampling row returns; empty: one each
    num_drafted: Buffer = b""  # int32[S]: how many tokens were guessed for each sampling row; empty: none
    num_draft_us: int = 0  # time that guessing took; part of `num_forward_us`
    num_copied_pages: int = 0  # between device and host: copies that have ended since the last result
    num_copy_us: int = 0  # time that these copies took; not part of `num_forward_us`
    num_forced: Buffer = b""  # int32[S]: how many more tokens a row's grammar forces next, if known; empty: none
    drafter_error: str = ""  # why the drafter is switched off from now on; sent once
    pooled: Buffer = b""  # fp32[sum(pooled_sizes)]: the vectors of the sampling rows that pool
    pooled_sizes: Buffer = b""  # int32[P]
    sampler_states: Buffer = b""  # fp32[S]: what a sampler keeps of each row with samplers; empty: none keeps anything


class WorkerFailed(Message, frozen=True):
    """The worker cannot go on (out of memory, device error); it exits after this."""

    step_id: int
    reason: str
    is_out_of_memory: bool = False  # a smaller step may work
