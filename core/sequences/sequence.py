"""The scheduler's state of a request and of its sequences.

The counters of a running sequence, over token positions:

    0 ............ settled ............ computed ........ target
    [ KV is there  )[ KV in flight      )[ to be computed )

    num_settled_tokens    returned by the worker; pages are cached or freed on this basis only
    num_computed_tokens   launched; num_inflight_tokens = computed - settled
    target                num_tokens (known ids) + samples in flight; the next chunk is target - computed

The stored field is num_unsettled_tokens = num_tokens - settled. While a sequence decodes it stays 1 (its last token),
so a result changes nothing but the token ids.

A chunk that reaches the target samples. From its first sample on, a sequence decodes: each step computes one position
and samples one token, so `target == computed + 1` until it may sample no more. With drafts (`core/steps/drafts.py`) a
step computes more positions and samples up to as many tokens; until its result is there, `computed` and `target` assume
the maximum.
"""

from array import array
from collections.abc import Hashable
from math import inf
from typing import Any

from msgspec.structs import replace

from penstock.core.kv.page_pool import CacheNode
from penstock.core.kv.window_pages import WindowTable
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import (
    AddRequest,
    CacheMiss,
    ErrorCode,
    SamplingParams,
    SequenceBill,
    SequenceDelta,
    SequenceProgress,
)

Owner = bytes
"""Identity of the frontend that a request came from; opaque here."""

Key = tuple[float, ...]
"""What a policy sorts requests by; all keys of a policy have the same length, and contain no NaN."""


class Request:
    """What a client asked for. Holds only its live sequences; finished ones are forgotten."""

    __slots__ = (
        "adapter",
        "adapter_id",
        "arrived",
        "base_level",
        "cache_salt",
        "deadline",
        "embedding_ids",
        "first_token_at",
        "first_token_due",
        "gives_way",
        "grammar_id",
        "group",
        "handover_from",
        "has_targets",
        "images",
        "is_background",
        "is_lined_up",
        "is_parked",
        "is_paused",
        "late",
        "level",
        "marks",
        "max_len",
        "namespace",
        "num_prompt_tokens",
        "owner",
        "prefill_at",
        "priority",
        "prompt_token_ids",
        "renews_at",
        "request_id",
        "running",
        "sampling",
        "seconds_per_token",
        "seconds_waited",
        "stop_token_ids",
        "tenant",
        "waited_for",
        "waiting",
        "waits_since",
        "weight",
    )

    def __init__(self, message: AddRequest, owner: Owner, max_model_len: int, now: float = 0.0) -> None:
        self.request_id = message.request_id
        self.owner = owner
        self.is_background = message.is_background  # whether no client waits for it
        self.gives_way = ""  # if it yields row and pages to all that do not: as what
        self.base_level: Key = ()
        """Precedes the key in the level. With batches it begins with 0 in the running batch, and with 1 elsewhere."""
        self.level: Key = self.base_level  # then its key under the policy: lower runs first and is preempted last
        self.priority = message.priority
        self.tenant = message.tenant
        self.weight = message.weight  # the tenant's share, relative to others
        self.group = message.group or message.request_id
        self.cache_salt = message.cache_salt
        self.namespace: Hashable = message.cache_salt
        self.images = message.images
        self.marks: dict[int, bytes] | None = None  # of its pages with images, if any
        self.embedding_ids: dict[bytes, int] = {}  # by image key, for the images still needed
        self.prefill_at = (
            () if message.images or message.adapter else message.prefill_at
        )  # engines that may compute the prompt
        self.handover_from = message.handover_from  # tokens that the engine has for which it is computed; -1: none
        self.prompt_token_ids = unpack_int32(message.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.sampling = message.sampling
        self.stop_token_ids = frozenset(message.sampling.stop_token_ids)
        self.max_len = 0  # prompt + output tokens at which a sequence has its full length
        self.limit_length(max_model_len)
        self.waiting: list[Sequence] = [Sequence(self, idx) for idx in range(message.n)]  # by sequence_idx
        if message.progress:
            self.waiting = [self.waiting[resumed.sequence_idx] for resumed in message.progress]
            for seq, resumed in zip(self.waiting, message.progress, strict=True):
                seq.restore(resumed)
        self.running: list[Sequence] = []
        self.adapter = message.adapter  # its key; empty: none
        self.adapter_id = 0  # in the worker; 0 if there is none, or it is not prepared yet
        self.grammar_id = 0  # in the worker; 0 if there is none, or it is not prepared yet
        self.is_lined_up = False  # whether it is in line with the requests that have new sequences
        self.is_parked = False
        self.is_paused = False  # whether its client has stopped reading
        self.waited_for = ""  # the reason, noted once it had waited for long
        self.arrived = 0.0 if message.progress else now  # 0: at an earlier scheduler
        self.waits_since: float | None = None  # this and the next two are kept by an order with keys
        self.seconds_waited = 0.0  # before `waits_since`
        self.renews_at = inf  # when its key is recomputed
        self.deadline = now + message.seconds_left if message.seconds_left else inf  # by the same clock
        self.first_token_due = now + message.ttft_left if message.ttft_left else inf
        self.seconds_per_token = message.tpot or inf
        self.has_targets = min(self.deadline, self.first_token_due, self.seconds_per_token) < inf
        self.late = ""  # why it can no longer meet its targets, if a policy has found that
        has_outputs = any(resumed.token_ids for resumed in message.progress)
        self.first_token_at = now if has_outputs else 0.0  # kept by policies that look at targets

    def limit_length(self, max_model_len: int) -> None:
        if self.sampling.pooling is not None:
            max_model_len += 1  # no token is sampled, so none needs a place
        self.max_len = min(self.num_prompt_tokens + self.sampling.max_tokens, max_model_len)

    def waited(self, now: float) -> float:
        """Return the seconds that it has waited for rows; only under a policy with keys."""
        return self.seconds_waited + (now - self.waits_since if self.waits_since is not None else 0.0)

    @property
    def is_overdue(self) -> bool:
        """Whether it has the empty key, which comes before all others."""
        return self.level == self.base_level

    def shorten(self, max_model_len: int) -> "list[Sequence]":
        """Limit the length of all sequences, none of which runs; return those that have reached it already."""
        self.limit_length(max_model_len)
        for seq in self.waiting:
            seq.limit_length(self.max_len)
        return [seq for seq in self.waiting if seq.num_tokens >= seq.max_len]

    @property
    def is_new(self) -> bool:
        """Whether none of its sequences ever had a row here."""
        return all(seq.num_cached_tokens < 0 for seq in (*self.running, *self.waiting))

    @property
    def is_live(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def can_fork(self) -> bool:
        """Whether a sequence outlives the step that settles its prompt: it has more than one token to sample."""
        return self.max_len - self.num_prompt_tokens > 1


class Account:
    """What a sequence has cost so far (`core/scheduling/accounts.py`), with the sums as of its last update."""

    __slots__ = (
        "contexts", "is_closed", "num_accepted", "num_guessed", "num_preemptions", "num_reached",
        "num_recomputed_tokens", "num_steps", "num_steps_before", "num_us", "offset", "rates", "rows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.num_us = 0.0  # device time
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_reached = 0  # most positions that it ever had computed
        self.num_recomputed_tokens = 0
        self.num_guessed = self.num_accepted = 0  # tokens
        self.is_closed = False  # the bill has been made
        self.rows = self.rates = self.contexts = 0.0
        self.num_steps_before = 0
        self.offset = 0  # its context minus the number of steps


class Sequence:
    """One stream of tokens. Loops over all rows read its fields, so these are plain slots, not properties."""

    __slots__ = (
        "acceptance",
        "account",
        "append_token",
        "cache_miss",
        "cache_node",
        "due_step",
        "epoch",
        "is_returning",
        "is_waiting",
        "launch_limit",
        "max_computed_tokens",
        "max_len",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_logprobs",
        "num_prompt_logprobs_due",
        "num_prompt_logprobs_sent",
        "num_tree_pages",
        "num_unsettled_tokens",
        "num_unsure_tokens",
        "owner",
        "page_ids",
        "page_seconds",
        "queued_us",
        "request",
        "request_id",
        "row",
        "running_epoch",
        "sampler_state",
        "sequence_idx",
        "settle_event",
        "stop_token_ids",
        "token_ids",
        "turn",
        "window_tables",
    )

    def __init__(self, request: Request, sequence_idx: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.owner = request.owner
        self.sequence_idx = sequence_idx
        self.stop_token_ids = request.stop_token_ids
        # The prompt is shared until the sequence runs, so that n waiting sequences do not cost n copies.
        self.token_ids = request.prompt_token_ids
        self.append_token = self.token_ids.append
        self.num_cached_tokens = -1  # prompt tokens not computed at the first admission; -1 before it
        self.cache_miss: CacheMiss = ""  # set if some layers keep states
        self.queued_us = 0  # its wait for the first row
        self.account: Account | None = None  # made when it gets its first row
        self.acceptance: Any = None  # of drafts: kept by the part that decides on them
        self.sampler_state: float | None = None  # what a sampler keeps, as of its last settled token
        self.page_seconds = 0.0  # sum over its pages: minus the time it was taken, plus the time it was given back
        self.epoch = 0
        self.turn = -1  # sequence number of its first admission; -1 before it
        self.is_waiting = False
        self.is_returning = False  # whether it waits for a row again
        self.limit_length(request.max_len)
        self.num_logprobs = request.sampling.num_logprobs
        # Position p gives the log-probability of token p + 1. All sequences share the prompt, so only one reports it.
        wants_prompt = request.sampling.prompt_logprobs >= 0 and sequence_idx == 0
        self.num_prompt_logprobs_due = request.num_prompt_tokens - 1 if wants_prompt else 0
        self.num_prompt_logprobs_sent = 0  # sent so far; a recomputed position is not sent again
        self.clear()

    def clear(self) -> None:
        """The sequence stops running: forget everything that belongs to a row."""
        self.row = -1
        self.running_epoch = -1  # `epoch` while it has a row: one comparison detects a stale result
        self.page_ids: list[int] = []
        self.window_tables: list[WindowTable] = []  # one for each page group after the first
        self.num_computed_tokens = 0
        self.num_unsettled_tokens = self.num_tokens
        self.num_unsure_tokens = 0  # launched in steps with drafts, which may return fewer
        self.launch_limit = 0  # computed positions stay below this without new pages or a possible end
        self.settle_event = 0  # number of settled tokens at which there is more to do than append a token
        self.due_step = -1  # the earliest step whose result reaches it
        self.cache_node: CacheNode | None = None  # cursor in the prefix cache
        self.num_tree_pages = 0  # page_ids[:num_tree_pages] are in the tree, down to the cursor

    def limit_length(self, max_len: int) -> None:
        """Set the number of prompt + output tokens at which it has its full length."""
        self.max_len = max_len
        self.max_computed_tokens = max_len - 1  # the last token is sampled but never computed

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_settled_tokens(self) -> int:
        return len(self.token_ids) - self.num_unsettled_tokens

    @property
    def num_inflight_tokens(self) -> int:
        return self.num_computed_tokens - self.num_settled_tokens

    @property
    def is_new(self) -> bool:
        """Whether it has not had a row yet."""
        return self.turn < 0

    @property
    def order(self) -> tuple[Key, int]:
        """Order of the sequences that have had a row: smaller runs first and is preempted last; unique."""
        return self.request.level, self.turn

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether prompt positions from `num_prompt_logprobs_sent` on must be computed, cached or not."""
        return self.num_prompt_logprobs_sent < self.num_prompt_logprobs_due

    @property
    def num_reusable_tokens(self) -> int:
        """Known tokens that a cached prefix may save; excludes positions whose output is needed."""
        if self.needs_all_positions:
            return 0
        return self.num_prompt_logprobs_sent if self.owes_prompt_logprobs else self.num_tokens - 1

    @property
    def needs_all_positions(self) -> bool:
        """Whether all positions must be computed in one row, for more than the last hidden state."""
        pooling = self.request.sampling.pooling
        return pooling is not None and pooling.kind != "last"

    def sampling(self) -> SamplingParams:
        """Return the parameters, with the sequence's own seed and adjusted to the output that is still missing."""
        params = self.request.sampling
        if params.grammar:
            params = replace(params, grammar="")  # the worker has it already
        if params.prompt_logprobs >= 0 and not self.owes_prompt_logprobs:
            params = replace(params, prompt_logprobs=-1)
        if not self.sequence_idx:
            return params
        return replace(params, seed=(params.seed + self.sequence_idx) % 2**63)

    def error_delta(self, error: str, code: ErrorCode = "internal", bill: SequenceBill | None = None) -> SequenceDelta:
        """Return the last delta of a sequence that fails."""
        return SequenceDelta(
            self.request_id, self.sequence_idx, (), finish_reason="error", error=error, error_code=code, bill=bill
        )

    def restore(self, resumed: SequenceProgress) -> None:
        """Continue after outputs of an earlier scheduler: they are known but not computed, as after a preemption."""
        self.num_prompt_logprobs_sent = resumed.num_prompt_logprobs
        if resumed.token_ids:
            self.own_token_ids().extend(unpack_int32(resumed.token_ids))
            self.num_cached_tokens = 0  # it was sent with the first output
            self.sampler_state = resumed.sampler_state
            self.num_unsettled_tokens = self.num_tokens

    def own_token_ids(self) -> "array[int]":
        """Give the sequence its own token buffer (before its first output) and return it."""
        if self.token_ids is self.request.prompt_token_ids:
            self.token_ids = self.token_ids[:]
            self.append_token = self.token_ids.append
        return self.token_ids
