"""Moves a result's columns of log-probabilities into each sequence's delta.

Output tokens: a delta has the log-probabilities of its tokens, if the sequence asks for them. Those of dropped tokens
are dropped too.

Prompt tokens: position p gives the log-probability of token p + 1 whenever a chunk computes p. So a sequence that still
owes some starts at `num_prompt_logprobs_sent` at the latest, with or without a prefix hit:

    positions   0 ........ start ....... sent ......................... num_prompt_tokens - 1
                [ reused )[ computed again )[ computed for the first time )
                                            [ sent                        )

So each is sent once, in order, however often the sequence is preempted in between.
"""

from collections.abc import Iterator
from itertools import repeat

from msgspec.structs import replace

from penstock.core.sequences.sequence import Owner, Sequence
from penstock.core.steps.plan_builder import Chunk, InFlightStep
from penstock.ipc.messages import SequenceDelta, StepResult, TokenLogprobs

_ITEM = 4  # bytes of an int32 and of an fp32


def check_logprobs(step: InFlightStep, result: StepResult, counts: list[int]) -> str:
    """Return what is wrong with the sizes of a result's log-probabilities; empty if they are right.

    `counts` are those of `checked_tokens`.
    """
    sampled = list(_sampling(step, counts))
    prompts = [chunk for chunk in step.chunks if chunk.num_prompt_logprobs]
    return _why_not(
        "output tokens",
        TokenLogprobs(result.logprob_ids, result.logprobs, result.logprob_ranks),
        sum(count for _, count in sampled),
        max((seq.num_logprobs for seq, count in sampled if count), default=0),
    ) or _why_not(
        "prompt tokens",
        TokenLogprobs(result.prompt_logprob_ids, result.prompt_logprobs, result.prompt_logprob_ranks),
        sum(chunk.num_prompt_logprobs for chunk in prompts),
        max((chunk.seq.request.sampling.prompt_logprobs for chunk in prompts), default=0),
    )


def attach_logprobs(
    step: InFlightStep, result: StepResult, counts: list[int], output: dict[Owner, list[SequenceDelta]]
) -> None:
    """Put log-probabilities into the deltas of this result; prompt chunks without a delta get one.

    The result must have passed `check_logprobs` and been applied: dropped tokens have no delta in `output`.
    """
    places = {
        (delta.request_id, delta.sequence_idx): (deltas, i)
        for deltas in output.values()
        for i, delta in enumerate(deltas)
    }
    table = TokenLogprobs(result.logprob_ids, result.logprobs, result.logprob_ranks)
    first = 0
    for seq, count in _sampling(step, counts):
        place = places.get((seq.request_id, seq.sequence_idx))
        if place is not None:
            deltas, j = place
            scores = _rows(table, first, len(deltas[j].token_ids), 1 + seq.num_logprobs)
            deltas[j] = replace(deltas[j], logprobs=scores)
        first += count
    table = TokenLogprobs(result.prompt_logprob_ids, result.prompt_logprobs, result.prompt_logprob_ranks)
    first = 0
    for chunk in step.chunks:
        count = chunk.num_prompt_logprobs
        if count:
            told = _of_prompt(table, first, chunk)
            first += count
            seq = chunk.seq
            place = places.get((seq.request_id, seq.sequence_idx))
            if place is None and (chunk.samples or seq.running_epoch != chunk.epoch):
                continue  # dropped
            seq.num_prompt_logprobs_sent = max(seq.num_prompt_logprobs_sent, chunk.start + count)
            if told is None:
                continue
            if place is None:
                delta = SequenceDelta(seq.request_id, seq.sequence_idx, (), prompt_logprobs=told)
                output.setdefault(seq.owner, []).append(delta)
            else:
                deltas, j = place
                deltas[j] = replace(deltas[j], prompt_logprobs=told)


def _sampling(step: InFlightStep, counts: list[int]) -> Iterator[tuple[Sequence, int]]:
    """The step's sampling sequences, each with its number of tokens, in the order of the plan."""
    if step.decodes.has_logprobs:
        each = zip(step.decodes.seqs, counts or repeat(1), strict=False)  # followed by those of the chunks
        yield from ((seq, count) for seq, count in each if seq.num_logprobs >= 0)
    yield from ((chunk.seq, 1) for chunk in step.chunks if chunk.samples and chunk.seq.num_logprobs >= 0)


def _of_prompt(table: TokenLogprobs, first: int, chunk: Chunk) -> TokenLogprobs | None:
    """The entries of a chunk that were not sent before."""
    known = max(0, chunk.seq.num_prompt_logprobs_sent - chunk.start)
    if known >= chunk.num_prompt_logprobs:
        return None
    width = 1 + chunk.seq.request.sampling.prompt_logprobs
    return _rows(table, first + known, chunk.num_prompt_logprobs - known, width)


def _rows(table: TokenLogprobs, first: int, count: int, width: int) -> TokenLogprobs:
    """The first `width` columns of `count` rows."""
    ranks = table.ranks[first * _ITEM : (first + count) * _ITEM]
    full = len(table.token_ids) // len(table.ranks)
    if width == full:
        whole = slice(first * full * _ITEM, (first + count) * full * _ITEM)
        return TokenLogprobs(table.token_ids[whole], table.logprobs[whole], ranks)
    parts = [slice(i * full * _ITEM, (i * full + width) * _ITEM) for i in range(first, first + count)]
    return TokenLogprobs(
        b"".join(table.token_ids[part] for part in parts), b"".join(table.logprobs[part] for part in parts), ranks
    )


def _why_not(what: str, table: TokenLogprobs, count: int, num_best: int) -> str:
    if len(table.token_ids) != len(table.logprobs) or len(table.ranks) != count * _ITEM:
        return f"log-probabilities of {count} {what} are due, got {len(table.ranks) // _ITEM}"
    width, rest = divmod(len(table.token_ids), count * _ITEM) if count else (1 + num_best, len(table.token_ids))
    if rest or width < 1 + num_best:
        return f"log-probabilities of {what} are due for {1 + num_best} tokens each, got {width}"
    return ""
