"""Computes recorded requests again, in batches that depend on the options, and compares their outputs."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from penstock.in_process import InProcessEngine
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import AddRequest, SequenceDelta
from penstock.parts.recording.lines import End, read_back
from penstock.parts.recording.reader import Recorded
from penstock.replay.outcome import Outcome, first_difference

_ENDED = ("stop", "length")
_TARGETS = {"ttft", "tpot"}
"""Fields of requests that count from the time of arrival."""
_MAX_WAITING_SEQS = 4096
"""The most sequences that are queued if times do not matter: enough for every policy to choose from."""


@dataclass(slots=True)
class _Running:
    recorded: Recorded
    expected: dict[int, End]  # the sequences to compare
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, SequenceDelta] = field(default_factory=dict)


def replay_requests(
    engine: InProcessEngine, requests: Iterable[Recorded], *, at_recorded_times: bool = False
) -> Iterator[Outcome]:
    """Run requests again in their order; yield each sequence's outcome as soon as its request has ended.

    Args:
        engine: must be idle.
        requests: with their tokens.
        at_recorded_times: send each request as long after the first one as it was recorded; otherwise as soon as there
            is room.
    """
    waiting: deque[tuple[float, AddRequest, _Running]] = deque()
    for recorded in requests:
        made = _made_again(recorded, keeps_times=at_recorded_times)
        if isinstance(made, Outcome):
            yield made
        else:
            waiting.append((recorded.arrival.at, *made))
    running: dict[str, _Running] = {}
    began = time.monotonic() - (waiting[0][0] if waiting else 0.0)
    while waiting or engine.has_work:
        while waiting and (
            time.monotonic() >= began + waiting[0][0]
            if at_recorded_times
            else engine.scheduler.waiting.num_seqs < _MAX_WAITING_SEQS
        ):
            _, message, one = waiting.popleft()
            refusal = engine.add_request(message)
            if refusal is None:
                running[message.request_id] = one
            else:
                yield Outcome(message.request_id, -1, "skipped", why=f"it is refused here: {refusal.reason}")
        step = engine.step()
        for delta in step.deltas:
            if (ended := _take(running, delta)) is not None:
                yield from _compared(ended)
        if step.plan is None and not step.deltas:
            pause = engine.seconds_to_wait
            until_next = began + waiting[0][0] - time.monotonic() if waiting and at_recorded_times else None
            time.sleep(max(0.0, min((each for each in (pause, until_next) if each is not None), default=0.0)))


def _made_again(recorded: Recorded, *, keeps_times: bool) -> tuple[AddRequest, _Running] | Outcome:
    """The request to send, or why it is not computed again."""
    arrival = recorded.arrival
    if arrival.refused:
        return Outcome(arrival.id, -1, "skipped", why=f"it was refused ({arrival.refused})")
    ended = {seq: end for seq, end in recorded.ends.items() if end.reason in _ENDED}
    cut = {seq: end for seq, end in recorded.ends.items() if end.reason not in _ENDED and end.num_tokens}
    if not ended and not cut:
        errors = {end.error or end.reason for end in recorded.ends.values()}
        why = f"it ended before its first token ({', '.join(sorted(errors))})" if errors else "its end is not recorded"
        return Outcome(arrival.id, -1, "skipped", why=why)
    if not recorded.has_tokens:
        return Outcome(arrival.id, -1, "skipped", why="its prompt is not recorded")
    try:
        sampling = recorded.sampling()
        if sampling.pooling is not None:
            return Outcome(arrival.id, -1, "skipped", why="it asked for an embedding, and vectors are not recorded")
        if not ended:  # its later tokens are unknown
            sampling = replace(sampling, max_tokens=max(end.num_tokens for end in cut.values()))
        message = read_back(
            arrival.more if keeps_times else {name: arrival.more[name] for name in arrival.more.keys() - _TARGETS},
            AddRequest,
            request_id=arrival.id,
            prompt_token_ids=arrival.token_ids,
            sampling=sampling,
            n=arrival.n,
            priority=arrival.priority,
            cache_salt=arrival.salt,
            tenant=arrival.tenant,
            group=arrival.group,
            seconds_left=arrival.seconds_left if keeps_times else 0.0,
        )
    except msgspec.ValidationError as error:
        return Outcome(arrival.id, -1, "skipped", why=f"this version cannot read it: {error}")
    return message, _Running(recorded, ended | cut)


def _take(running: dict[str, _Running], delta: SequenceDelta) -> _Running | None:
    """Note a sequence's new tokens; return the request if it has ended."""
    one = running[delta.request_id]
    one.outputs.setdefault(delta.sequence_idx, []).extend(delta.token_ids)
    if delta.finish_reason is None:
        return None
    one.ends[delta.sequence_idx] = delta
    return running.pop(delta.request_id) if len(one.ends) == one.recorded.arrival.n else None


def _compared(one: _Running) -> Iterator[Outcome]:
    for seq, end in sorted(one.expected.items()):
        expected, got, delta = unpack_int32(end.token_ids), one.outputs[seq], one.ends[seq]
        is_whole = end.reason in _ENDED
        if not is_whole:
            got = got[: len(expected)]
        position = first_difference(expected, got)
        name, num_tokens = end.id, len(expected)
        if position >= 0:
            was = expected[position] if position < num_tokens else None
            now = got[position] if position < len(got) else None
            yield Outcome(name, seq, "differs", num_tokens, position, was, now, delta.error)
        elif is_whole and (end.reason, end.stop_token_id) != (delta.finish_reason, delta.stop_token_id):
            why = f"it ended by {delta.finish_reason!r}, and by {end.reason!r} before"
            yield Outcome(name, seq, "differs", num_tokens, why=why)
        else:
            yield Outcome(
                name, seq, "equal", num_tokens, why="" if is_whole else f"then came {end.error or end.reason}"
            )
