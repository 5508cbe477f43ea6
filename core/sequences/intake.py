"""Which requests the scheduler accepts, and why it refuses the others."""

from itertools import chain
from math import isfinite
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import fields

from penstock.config.options import SchedulerOptions
from penstock.core.sequences.drain_rate import DrainRate
from penstock.core.sequences.limits import WorkerLimits
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import AddRequest, ErrorCode, SamplingParams


class QueueBound:
    """How many turns may come before a new request's own, from the rate at which the queue empties."""

    __slots__ = ("_num_requeued", "_options", "_waiting", "drain", "max_turns")

    def __init__(self, options: SchedulerOptions, waiting: WaitingQueue) -> None:
        self._options = options
        self._waiting = waiting
        self._num_requeued = 0  # sequences requeued after a worker's death that may still wait
        self.drain = DrainRate()
        self.max_turns = 0  # 0: unlimited

    def requeued(self, num_seqs: int) -> None:
        """Sequences that had a row wait again because a process died."""
        self._num_requeued += num_seqs

    def turns_allowed(self) -> int:
        """The queue's limit plus requeued sequences: those that ran when a process died do not make the queue long."""
        self._num_requeued = min(self._num_requeued, self._waiting.num_seqs)
        return self.max_turns and self.max_turns + self._num_requeued

    def note(self, now: float, num_completed_seqs: int, num_admitted_tokens: int, num_rows: int) -> None:
        """Set the limit from the totals completed and admitted so far.

        Call it several times a second while requests come and go.
        """
        options, waiting = self._options, self._waiting
        self.drain.note(now, waiting.num_seqs, num_completed_seqs, num_admitted_tokens)
        if options.queue_patience:
            self.max_turns = self.drain.turns_within(options.queue_patience, num_rows)


class Refusal(NamedTuple):
    """Why a request is refused: a code for programs, and one sentence with the limit and the value."""

    code: ErrorCode
    reason: str


def check_request(
    message: AddRequest, limits: WorkerLimits, waiting: WaitingQueue, options: SchedulerOptions, max_turns: int
) -> Refusal | None:
    """Return why the request cannot be queued now (queue_full), or can never run here (all other codes)."""
    num_prompt_tokens, remainder = divmod(len(message.prompt_token_ids), 4)
    if remainder or not num_prompt_tokens:
        return Refusal("internal", f"the prompt is not an int32 buffer: {len(message.prompt_token_ids)} bytes")
    max_len = limits.max_sequence_len
    if message.sampling.pooling is not None:
        if refusal := _check_pooled(message, num_prompt_tokens, limits):
            return refusal
    elif num_prompt_tokens >= max_len:
        return Refusal(
            "too_long",
            f"the prompt has {num_prompt_tokens} tokens; at most {max_len - 1} leave room for a token of output",
        )
    # A request that was once admitted is not dropped: resumed requests were waiting or running, which bounds them.
    if not message.progress and (refusal := _check_room(message, num_prompt_tokens, waiting, options, max_turns)):
        return refusal
    if not all(map(isfinite, (message.seconds_left, message.ttft_left, message.tpot, message.weight))):
        return Refusal("internal", "the time left for the request, a target or a weight is not a finite number")
    num_logprobs = max(message.sampling.num_logprobs, message.sampling.prompt_logprobs)
    if num_logprobs > limits.vocab_size:
        return Refusal("internal", f"{num_logprobs} logprobs requested, but the vocabulary has {limits.vocab_size}")
    return (
        _check_sampling(message.sampling, limits.vocab_size)
        or _check_token_ids(message.prompt_token_ids, limits)
        or _check_resumed(message, num_prompt_tokens, limits)
    )


def _check_pooled(message: AddRequest, num_prompt_tokens: int, limits: WorkerLimits) -> Refusal | None:
    """Return why a request for a vector cannot be served; its text may fill the context."""
    params = message.sampling
    if num_prompt_tokens > limits.max_sequence_len:
        return Refusal("too_long", f"the text has {num_prompt_tokens} tokens; at most {limits.max_sequence_len} fit")
    if limits.num_stages > 1:
        return Refusal("internal", f"a pipeline of {limits.num_stages} stages makes no embeddings")
    if message.n != 1 or params.max_tokens != 1 or params.grammar or params.stop_token_ids:
        return Refusal("internal", "a request for a vector has one sequence, and one token that nothing is asked of")
    if max(params.num_logprobs, params.prompt_logprobs) >= 0 or any(each.token_ids for each in message.progress):
        return Refusal("internal", "a request for a vector has no log-probabilities and no earlier outputs")
    return None


def _check_room(
    message: AddRequest, num_prompt_tokens: int, waiting: WaitingQueue, options: SchedulerOptions, max_turns: int
) -> Refusal | None:
    n = message.n
    # Other tenants' sequences do not shut out a tenant that has none waiting: its turn comes soon.
    is_beside_others = waiting.num_seqs > 0 and not waiting.has_tenant(message.tenant)
    max_num_seqs = options.max_num_queued_seqs * (2 if is_beside_others else 1)
    if waiting.num_seqs + n > max_num_seqs:
        return Refusal(
            "queue_full",
            f"{waiting.num_seqs} sequences are waiting and the request has {n}; at most {max_num_seqs} may wait",
        )
    if max_turns and waiting.num_seqs and not waiting.has_group(message.tenant, message.group):
        num_turns = waiting.turns_before(message.tenant)
        if num_turns >= max_turns:
            return Refusal("queue_full", f"{num_turns} others would have their turn before; at most {max_turns} may")
    # A request that finds the queue empty is accepted whatever its size: waiting longer would not help it.
    if waiting.num_tokens and waiting.num_tokens + n * num_prompt_tokens > options.max_num_queued_tokens:
        return Refusal(
            "queue_full",
            f"sequences of {waiting.num_tokens} tokens are waiting and the request has {n * num_prompt_tokens}; "
            f"at most {options.max_num_queued_tokens} may wait",
        )
    return None


_FLOATS = tuple(field.name for field in fields(SamplingParams) if isinstance(field.default, float))
_floats_of = attrgetter(*_FLOATS)


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> Refusal | None:
    """Return what would crash the worker, and what the types of messages allow.

    Frontends check ranges, with better messages (`frontend/validation/common.py`); this is for other senders.
    """
    of_samplers = chain.from_iterable(use.values for use in sampling.samplers)
    if not all(map(isfinite, (*_floats_of(sampling), *(bias for _, bias in sampling.logit_bias), *of_samplers))):
        return Refusal("internal", "a sampling parameter is not a finite number")
    used = [*sampling.allowed_token_ids, *chain.from_iterable(sampling.bad_words), *(i for i, _ in sampling.logit_bias)]
    if sampling.min_tokens:
        used += sampling.stop_token_ids  # else they are only compared with sampled tokens
    if used and not 0 <= min(used) <= max(used) < vocab_size:
        return Refusal("internal", f"a sampling parameter names a token outside the vocabulary of {vocab_size} tokens")
    return None


def _check_token_ids(buffer: bytes, limits: WorkerLimits) -> Refusal | None:
    token_ids = unpack_int32(buffer)
    if (lowest := min(token_ids)) < 0 or (highest := max(token_ids)) >= limits.vocab_size:
        worst = lowest if lowest < 0 else highest
        return Refusal("internal", f"token id {worst} is outside the vocabulary of {limits.vocab_size} tokens")
    return None


def _check_resumed(message: AddRequest, num_prompt_tokens: int, limits: WorkerLimits) -> Refusal | None:
    """Return why a request cannot continue where another scheduler left it."""
    most = limits.max_sequence_len + (message.sampling.pooling is not None)
    max_len = min(num_prompt_tokens + message.sampling.max_tokens, most)
    last_idx = -1
    for resumed in message.progress:
        if not last_idx < resumed.sequence_idx < message.n:
            return Refusal("internal", f"sequence {resumed.sequence_idx} is resumed out of order, of {message.n}")
        last_idx = resumed.sequence_idx
        num_outputs, remainder = divmod(len(resumed.token_ids), 4)
        if remainder:
            return Refusal("internal", f"resumed tokens are not an int32 buffer: {len(resumed.token_ids)} bytes")
        if num_prompt_tokens + num_outputs >= max_len:
            length = num_prompt_tokens + num_outputs
            return Refusal("too_long", f"a sequence resumes at {length} tokens; with one more it may have {max_len}")
        if not 0 <= resumed.num_prompt_logprobs < num_prompt_tokens:
            return Refusal("internal", f"{resumed.num_prompt_logprobs} of {num_prompt_tokens} prompt tokens were told")
        if num_outputs and (refusal := _check_token_ids(resumed.token_ids, limits)):
            return refusal
    return None
