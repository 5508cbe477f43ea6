"""One HTTP request's generation: its sequences from engine deltas to text, their stops, and its single end.

AddRequest(s) --> engine          a request per prompt, `n` sequences each;
deltas <--------- engine          global index = prompt index * n + sequence_idx
  |  push(): into a bounded buffer, by the book of live requests
  v  async for: detokenize, look for stop strings, merge what has accumulated
SequenceEvents --> handler        one per sequence that has news
close()                           aborts what is unfinished; runs on every path
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol, Self

from penstock.frontend.engine.book import Bill, DeltaSink
from penstock.frontend.engine.link import QueueGate, retry_after
from penstock.frontend.engine.scores import HeldScores, ShownToken, TokenScore, num_scored, read_scores
from penstock.frontend.errors import (
    ApiError,
    DeadlineExceeded,
    EndsWorkers,
    EngineFailed,
    GrammarFailed,
    InvalidLogits,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TargetMissed,
    TargetUnattainable,
)
from penstock.frontend.schema import Timings
from penstock.frontend.targets import Targets
from penstock.frontend.text.stop_strings import StopMatcher, StopStrings
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.ipc.messages import AddRequest, EngineStats, SequenceDelta, TokenLogprobs

StopReason = str | int | None

MAX_UNREAD_TOKENS, MAX_UNREAD_PER_SEQUENCE = 64, 4
"""As events these tokens take about 16 KiB. The limit grows with the sequences, which each yield a token per step."""

BILL_SECONDS = 5.0
"""How long an answer waits for the rest of its bill: steps are still in flight when a stop string ends a sequence."""


@dataclass(slots=True)
class SequenceEvent:
    """News of one sequence. An event without text still carries its token ids."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: StopReason = None
    scores: list[ShownToken] | None = None  # of the tokens whose text has been released; None if there are none


@dataclass(frozen=True, slots=True)
class OutputRules:
    """How token ids become the text that a client sees."""

    tokenizer: TextTokenizer
    skip_special_tokens: bool = True
    shown: frozenset[int] = frozenset()  # special tokens that are never skipped
    stop: StopStrings | None = None
    include_stop: bool = False
    min_tokens: int = 0
    reported_stop_token_ids: frozenset[int] = frozenset()
    is_prompt_only: bool = False  # one token is sampled, but not returned


class SequenceText:
    """One sequence's path from token ids to text, up to its end."""

    __slots__ = ("_detokenizer", "_matcher", "_num_shown", "_rules", "_scores", "finish_reason", "num_tokens", "pooled")

    def __init__(self, rules: OutputRules) -> None:
        self._rules = rules
        self._detokenizer = rules.tokenizer.detokenizer(
            skip_special_tokens=rules.skip_special_tokens, shown=rules.shown
        )
        self._matcher = None if rules.stop is None else StopMatcher(rules.stop)
        self._scores: HeldScores | None = None  # made with the first token that has a score
        self._num_shown = 0  # characters; counted only for tokens with scores
        self.num_tokens = 0
        self.pooled = b""  # fp32[k], if a vector was requested instead of tokens
        self.finish_reason: str | None = None

    def advance(self, index: int, delta: SequenceDelta) -> SequenceEvent:
        """Take a delta; return an event with what may be shown to the client now."""
        if delta.logprobs is not None or self._rules.is_prompt_only:
            return self._advance_scored(index, delta)
        if len(delta.token_ids) == 1 and delta.finish_reason is None and self._matcher is None:  # nearly always
            self.num_tokens += 1
            return SequenceEvent(index, self._detokenizer.feed(delta.token_ids[0]), [*delta.token_ids])
        return self._advance(index, delta, [])

    def _advance_scored(self, index: int, delta: SequenceDelta) -> SequenceEvent:
        if self._rules.is_prompt_only:
            self.pooled = delta.pooled
            self.finish_reason = "stop" if delta.pooled else "length"
            return SequenceEvent(index, "", [], self.finish_reason)
        assert delta.logprobs is not None
        held = self._scores = self._scores or HeldScores()
        event = self._advance(index, delta, read_scores(delta.logprobs))
        self._num_shown += len(event.text)
        ended = event.finish_reason is not None
        event.scores = (held.release_all() if ended else held.release(self._num_shown)) or None
        return event

    def _advance(self, index: int, delta: SequenceDelta, scores: list[TokenScore]) -> SequenceEvent:
        """The general case; `scores` is empty or as long as the delta."""
        shown: list[str] = []
        for position, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            is_stop_token = delta.stop_token_id is not None and position == len(delta.token_ids) - 1
            if is_stop_token and not self._rules.include_stop:
                if scores and self._scores is not None:
                    self._scores.take(scores[position], "")
                break
            text = self._detokenizer.feed(token_id)
            if scores and self._scores is not None:
                self._scores.take(scores[position], text)
            stop = self._show(text, shown)
            if stop is not None:
                self.finish_reason = "stop"
                return SequenceEvent(index, "".join(shown), list(delta.token_ids[: position + 1]), "stop", stop)
        stop_reason: StopReason = None
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            stop_reason = self._show(self._detokenizer.flush(), shown)
            if stop_reason is not None:
                self.finish_reason = "stop"
            elif self._matcher is not None:
                shown.append(self._matcher.flush())
            if delta.stop_token_id in self._rules.reported_stop_token_ids:
                stop_reason = delta.stop_token_id
        return SequenceEvent(index, "".join(shown), list(delta.token_ids), self.finish_reason, stop_reason)

    def _show(self, text: str, shown: list[str]) -> str | None:
        """Append what may be shown; return the stop string, if one is complete."""
        if not text:
            return None
        if self._matcher is None or self.num_tokens <= self._rules.min_tokens:
            shown.append(text)
            return None
        visible, stop = self._matcher.feed(text)
        shown.append(visible)
        return stop


@dataclass(slots=True)
class Progress:
    """Counts and times of a generation, for usage, metrics and the log. Times are `time.monotonic`, in seconds."""

    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    submitted_at: float = 0.0
    queue_seconds: float = 0.0  # that the sequence with the first token waited for its row
    late: str = ""  # why that sequence was served after others
    finish_reasons: list[str] = field(default_factory=list)

    def targets_met(self, targets: Targets, arrived: float, num_sequences: int) -> bool:
        """Whether the tokens so far met the targets of a request that arrived at this time."""
        first = self.first_token_at
        if first is None:
            return False
        num_after = self.num_output_tokens / num_sequences - 1
        tpot_ms = (self.last_token_at - first) * 1e3 / num_after if num_after > 0 else 0.0
        return targets.are_met((first - arrived) * 1e3, tpot_ms)

    def timings(self, arrived: float) -> Timings:
        """The timings of a request that arrived at this time."""
        now = monotonic()
        first = self.first_token_at
        return Timings(
            ttft_ms=None if first is None else round((first - arrived) * 1e3, 3),
            output_ms=None if first is None else round((self.last_token_at - first) * 1e3, 3),
            total_ms=round((now - arrived) * 1e3, 3),
        )


class SlowReader:
    """The reader of one stream. A slow reader holds a bounded amount of output here, and nothing in the engine.

    keeps up --MAX_UNREAD_TOKENS unread, and it does not read--> paused: row and pages go to others
    paused   --it reads what was unread-->  keeps up            the engine continues with the very next token

    The watch over all connections disconnects a reader that reads nothing for too long.
    """

    __slots__ = ("_is_paused", "_max_unread", "_num_unread", "_pause", "_resume")

    def __init__(self, num_sequences: int, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """`pause` and `resume` pause and resume the request at the engine."""
        self._max_unread = max(MAX_UNREAD_TOKENS, MAX_UNREAD_PER_SEQUENCE * num_sequences)
        self._pause = pause
        self._resume = resume
        self._num_unread = 0  # tokens
        self._is_paused = False

    def pushed(self, num_tokens: int, *, is_awaited: bool) -> None:
        """Output has arrived. `is_awaited`: the reader waits for it, so even a burst does not make the reader slow."""
        self._num_unread += num_tokens
        if self._num_unread > self._max_unread and not is_awaited and not self._is_paused:
            self._is_paused = True
            self._pause()

    def took_all(self) -> None:
        """The reader has taken all output."""
        self._num_unread = 0
        if self._is_paused:
            self._is_paused = False
            self._resume()


class TokenSource(Protocol):
    """Where a generation's tokens come from: the engine (`RequestBook`), or what asks the engine for it."""

    @property
    def queue(self) -> QueueGate:
        """The gate to the engines' queues."""
        ...

    def submit(self, request: AddRequest, sink: DeltaSink, first_index: int = 0) -> None:
        """Begin a request, whose deltas go to `sink`."""
        ...

    def abort(self, request_id: str, sequence_idx: int = -1) -> None:
        """Stop a request, or one sequence of it. Idempotent."""
        ...

    def pause(self, request_id: str) -> None:
        """Compute nothing for a request until `resume`. Idempotent."""
        ...

    def resume(self, request_id: str) -> None:
        """Continue a paused request. Idempotent."""
        ...


class Generation:
    """A `DeltaSink` for all sequences of one HTTP request. Iterate over it with `async for`, until all have ended."""

    def __init__(
        self,
        engine: TokenSource,
        requests: Sequence[AddRequest],
        rules: OutputRules,
        on_gap: Callable[[float], None],
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        """`on_gap` gets the seconds between a sequence's tokens, `on_tokens` the number that arrived."""
        self._engine = engine
        self._requests = requests
        self._n = requests[0].n
        self._sequences = [SequenceText(rules) for request in requests for _ in range(request.n)]
        self._num_unfinished = len(self._sequences)
        self._last_token_at = [0.0] * len(self._sequences)
        self._on_gap = on_gap
        self._on_tokens = on_tokens
        self._loop = asyncio.get_running_loop()
        self._buffer: list[tuple[int, SequenceDelta]] = []
        self.bill = Bill(len(self._sequences))
        self._reader = SlowReader(len(self._sequences), self._pause, self._resume)
        self._waiter: asyncio.Future[None] | None = None
        self._error: ApiError | None = None
        self._is_closed = False
        self._of_prompts: list[list[TokenLogprobs]] = [[] for _ in requests]
        self._awaits_prompts = False
        self.progress = Progress()
        self.deadline: asyncio.TimerHandle | None = None  # cancelled by `close`

    @property
    def adapter(self) -> str:
        """The adapter that it is computed with; empty: none."""
        return self._requests[0].adapter

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended."""
        return self._num_unfinished == 0

    @property
    def late(self) -> str:
        """Why the request is served after others, as far as known; empty if it is not."""
        return self.progress.late or next((delta.late for _, delta in self._buffer if delta.late), "")

    @property
    def error(self) -> ApiError | None:
        """The error that the generation failed with."""
        return self._error

    @property
    def has_news(self) -> bool:
        """Whether the next iteration would return or raise at once."""
        return bool(self._buffer) or self._error is not None

    @property
    def num_sequences(self) -> int:
        """Prompts times `n`."""
        return len(self._sequences)

    @property
    def pooled(self) -> list[bytes]:
        """The vectors of all sequences that have ended, fp32[k] each."""
        return [sequence.pooled for sequence in self._sequences]

    def start(self) -> None:
        """Send the requests to the engine."""
        self.progress.submitted_at = monotonic()
        for prompt_index, request in enumerate(self._requests):
            self._engine.submit(request, self, prompt_index * self._n)

    def push(self, first_index: int, delta: SequenceDelta) -> None:
        if delta.prompt_logprobs is not None:
            self._of_prompts[first_index // self._n].append(delta.prompt_logprobs)
            if not delta.token_ids and delta.finish_reason is None:
                if self._awaits_prompts:
                    self._wake()
                return
        self._buffer.append((first_index + delta.sequence_idx, delta))
        self._reader.pushed(len(delta.token_ids), is_awaited=self._waiter is not None)
        if self._waiter is not None:
            self._wake()

    def fail(self, error: ApiError) -> None:
        """End the generation with an error, after what has arrived so far."""
        if self._error is None:
            self._error = error
        self._wake()

    def end(self, error: ApiError) -> None:
        """As `fail`, but stop the engine's work at once: rows and pages are freed even if the client reads slowly."""
        self.fail(error)
        self._abort_unfinished()

    def tick(self) -> None:
        """Make a waiting iteration return nothing, so that the handler can send a keep-alive."""
        self._wake()

    async def wait_first(self, seconds: float) -> None:
        """Wait for the first delta or a failure, at most `seconds`; an early failure can still become a status code.

        Raises:
            ApiError: if the engine refused the request.
        """
        if not self._buffer and self._error is None:
            timer = self._loop.call_later(seconds, self.tick)
            try:
                await self._wait()
            finally:
                timer.cancel()
        if self._buffer or self._error is not None:
            self._raise_failure()

    def _raise_failure(self) -> None:
        for _, delta in self._buffer:
            if delta.finish_reason in ("error", "abort"):
                raise self._failure_of(delta)
        if not self._buffer and self._error is not None:
            raise self._error

    async def billed(self) -> Bill:
        """Wait for the bills of all sequences, which must have ended. Does not wait if the engine is gone."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BILL_SECONDS):
                while not self.bill.is_complete:
                    self.bill.when_complete(self._wake)
                    await self._wait()
        return self.bill

    async def prompt_logprobs(self) -> list[list[TokenLogprobs]]:
        """Wait for the prompts' log-probabilities: for each prompt one entry per token except the first, in pieces.

        Raises:
            ApiError: if the generation failed.
        """
        self._awaits_prompts = True
        while any(
            request.sampling.prompt_logprobs >= 0 and num_scored(pieces) < len(request.prompt_token_ids) // 4 - 1
            for request, pieces in zip(self._requests, self._of_prompts, strict=True)
        ):
            self._raise_failure()
            await self._wait()
        self._awaits_prompts = False
        return self._of_prompts

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[SequenceEvent]:
        """Wait for news and return all there is, one event per sequence; empty after a `tick`.

        Raises:
            ApiError: if the generation failed; call `close` as always.
        """
        if not self._num_unfinished:
            raise StopAsyncIteration
        if not self._buffer and self._error is None:
            await self._wait()
        deltas, self._buffer = self._buffer, []
        self._reader.took_all()
        if len(deltas) == 1:
            event = self._advance(*deltas[0])
            if event is not None:
                return [event]
            deltas = []
        events: dict[int, SequenceEvent] = {}
        for index, delta in deltas:
            event = self._advance(index, delta)
            if event is not None:
                known = events.setdefault(index, event)
                if known is not event:
                    known.text += event.text
                    known.token_ids += event.token_ids
                    known.finish_reason, known.stop_reason = event.finish_reason, event.stop_reason
                    if event.scores:
                        known.scores = (known.scores or []) + event.scores
        if not events and self._error is not None:
            raise self._error
        return list(events.values())

    def close(self) -> None:
        """Abort what is unfinished. Idempotent; every user of a generation must call it in `finally`."""
        if not self._is_closed:
            self._is_closed = True
            if self.deadline is not None:
                self.deadline.cancel()
            self._abort_unfinished()

    def _advance(self, index: int, delta: SequenceDelta) -> SequenceEvent | None:
        sequence = self._sequences[index]
        if sequence.finish_reason is not None:
            return None  # a stop string ended the sequence while this delta was on its way
        if delta.finish_reason in ("error", "abort"):
            self.fail(self._failure_of(delta))  # raised once the events before it have been taken
            return None
        event = sequence.advance(index, delta)
        progress = self.progress
        if delta.num_cached_tokens and delta.sequence_idx == 0:
            progress.num_cached_tokens += delta.num_cached_tokens
        if event.token_ids:
            self._note_time(index, len(event.token_ids), delta)
        if event.finish_reason is not None:
            self._num_unfinished -= 1
            progress.finish_reasons.append(event.finish_reason)
            if delta.finish_reason is None:
                self._engine.abort(self._requests[index // self._n].request_id, delta.sequence_idx)
        return event

    def _failure_of(self, delta: SequenceDelta) -> ApiError:
        num_tokens = sum(len(request.prompt_token_ids) // 4 for request in self._requests) * self._n
        return failure_of(delta, self._engine.queue.stats, self.num_sequences, num_tokens)

    def _note_time(self, index: int, num_tokens: int, delta: SequenceDelta) -> None:
        now = monotonic()
        progress = self.progress
        progress.num_output_tokens += num_tokens
        if self._on_tokens is not None:
            self._on_tokens(num_tokens)
        progress.last_token_at = now
        if progress.first_token_at is None:
            progress.first_token_at = now
            progress.queue_seconds = delta.queued_us * 1e-6
            progress.late = delta.late
        last = self._last_token_at[index]
        if last:
            self._on_gap((now - last) / num_tokens)
        self._last_token_at[index] = now

    def _abort_unfinished(self) -> None:
        for request in self._requests:
            self._engine.abort(request.request_id)

    def _pause(self) -> None:
        for request in self._requests:
            self._engine.pause(request.request_id)

    def _resume(self) -> None:
        for request in self._requests:
            self._engine.resume(request.request_id)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_FAILURES: dict[str | None, type[ApiError]] = {
    "queue_timeout": DeadlineExceeded,
    "too_long": InvalidRequest,
    "grammar": GrammarFailed,
    "invalid_logits": InvalidLogits,
    "ends_workers": EndsWorkers,
    "unattainable": TargetUnattainable,
    "no_adapter": ModelNotFound,
}


def failure_of(delta: SequenceDelta, stats: Sequence[EngineStats], num_seqs: int, num_tokens: int) -> ApiError:
    """The error of a request with this many sequences and prompt tokens that the engine did not serve."""
    if delta.error_code == "queue_full":
        return Overloaded(delta.error, retry_after=retry_after(stats, num_seqs, num_tokens))
    if delta.error_code == "late":
        return TargetMissed(delta.error, retry_after=retry_after(stats, num_seqs, num_tokens))
    if kind := _FAILURES.get(delta.error_code):
        return kind(delta.error)
    if delta.finish_reason == "abort":
        return EngineFailed("the engine aborted the request")
    return EngineFailed(f"the engine failed on this request: {delta.error}" if delta.error else "the engine failed")
