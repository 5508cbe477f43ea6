"""A search's steps at the engine: each beam is a request for one more token, after the tokens that it has."""

import asyncio
import struct

import structlog
from msgspec.structs import replace

from penstock.frontend.engine.book import Bill, DeltaSink
from penstock.frontend.engine.generation import TokenSource
from penstock.frontend.engine.link import QueueGate
from penstock.frontend.engine.scores import read_scores
from penstock.frontend.errors import ApiError, from_exception
from penstock.frontend.validation.beams import Beams
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import (
    AddRequest,
    SamplingParams,
    SequenceBill,
    SequenceDelta,
    SequenceProgress,
    TokenLogprobs,
)
from penstock.parts.beam_search.frontend.search import Beam, Scored, Search

log = structlog.get_logger()


class Searches:
    """All searches of one request. It is asked like the engine, and asks the engine."""

    def __init__(self, beams: Beams, engine: TokenSource) -> None:
        self._beams = beams
        self._engine = engine
        self._running: dict[str, _Running] = {}

    @property
    def queue(self) -> QueueGate:
        """The engine's."""
        return self._engine.queue

    def submit(self, request: AddRequest, sink: DeltaSink, first_index: int = 0) -> None:
        """Begin to search for a prompt.

        Raises:
            Unavailable: as the engine does.
        """
        running = _Running(self._engine, self._beams, request, sink, first_index)
        running.begin()
        self._running[request.request_id] = running

    def abort(self, request_id: str, sequence_idx: int = -1) -> None:
        """Stop a search. One of its sequences cannot be stopped alone: all of them come at its end."""
        if sequence_idx < 0 and (running := self._running.pop(request_id, None)) is not None:
            running.stop()

    def pause(self, request_id: str) -> None:
        """Nothing: a search sends nothing before its end."""

    def resume(self, request_id: str) -> None:
        """Nothing, as it was not paused."""


class _Ended(Exception):
    """The engine has ended a step without a token."""

    def __init__(self, delta: SequenceDelta) -> None:
        super().__init__(delta.error)
        self.delta = delta


class _Step:
    """A beam's next token, as it comes from the engine."""

    def __init__(self, bill: Bill) -> None:
        self.bill = bill
        self.done: asyncio.Future[SequenceDelta] = asyncio.get_running_loop().create_future()

    def push(self, first_index: int, delta: SequenceDelta) -> None:
        if self.done.done():
            return
        if delta.finish_reason in ("error", "abort"):
            self.done.set_exception(_Ended(delta))
        elif delta.token_ids:
            self.done.set_result(delta)

    def fail(self, error: ApiError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Running:
    """One prompt's search."""

    def __init__(
        self, engine: TokenSource, beams: Beams, request: AddRequest, sink: DeltaSink, first_index: int
    ) -> None:
        self._engine = engine
        self._request = request
        self._sink = sink
        self._first_index = first_index
        params = request.sampling
        self._search = Search(
            beams.width,
            params.max_tokens,
            params.stop_token_ids,
            min_tokens=params.min_tokens,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
        )
        self._num_best = max(self._search.num_best, params.num_logprobs)
        self._bill = Bill(0)
        self._num_asked = 0
        self._live: set[str] = set()  # requests for steps
        self._first: SequenceDelta | None = None  # of the first step, which has had to wait like any request
        self._task: asyncio.Task[None] | None = None
        self._is_released = False

    def begin(self) -> None:
        """Ask for the first step; the others follow."""
        first = self._ask(self._search.beams[0])
        self._sink.bill.engine = self._bill.engine
        self._task = asyncio.create_task(self._go_on(first))

    def stop(self) -> None:
        """End it, whatever it does. Idempotent."""
        if self._task is not None:
            self._task.cancel()
        self._release()

    async def _go_on(self, first: "asyncio.Future[SequenceDelta]") -> None:
        try:
            steps = [first]
            while self._search.beams:
                deltas = await asyncio.gather(*steps)
                self._live.clear()
                self._first = self._first or deltas[0]
                self._search.advance([_best(delta) for delta in deltas])
                steps = [self._ask(beam) for beam in self._search.beams]
            for i, beam in enumerate(self._search.found[: self._request.n]):
                self._sink.push(self._first_index, self._delta(i, beam))
        except _Ended as ended:
            failed = replace(ended.delta, request_id=self._request.request_id, sequence_idx=0, bill=None)
            self._sink.push(self._first_index, failed)
        except ApiError as error:
            self._sink.fail(error)
        except Exception as error:
            log.exception("beam search failed")
            self._sink.fail(from_exception(error))
        finally:
            self._release()

    def _release(self) -> None:
        """Stop what still runs, and tell what all steps have cost once that is known."""
        for request_id in self._live:
            self._engine.abort(request_id)
        self._live.clear()
        if not self._is_released:
            self._is_released = True
            self._bill.when_complete(self._tell_bill)

    def _tell_bill(self) -> None:
        """All steps' bills, as one sequence's."""
        for bill in (self._whole_bill(), *[None] * (self._request.n - 1)):
            self._sink.bill.add(bill)

    def _ask(self, beam: Beam) -> "asyncio.Future[SequenceDelta]":
        self._num_asked += 1
        step = _Step(self._bill)
        # What shapes draws is left out: a search looks at the model's own probabilities.
        params = SamplingParams(max_tokens=len(beam.tokens) + 1, temperature=0.0, num_logprobs=self._num_best)
        progress = (SequenceProgress(0, pack_int32(beam.token_ids)),) if beam.tokens else ()
        request_id = f"{self._request.request_id}/{self._num_asked}"
        request = replace(self._request, request_id=request_id, sampling=params, n=1, progress=progress)
        self._engine.submit(request, step)
        self._bill.expect(1)
        self._live.add(request_id)
        return step.done

    def _delta(self, index: int, beam: Beam) -> SequenceDelta:
        first = self._first
        assert first is not None
        return SequenceDelta(
            self._request.request_id,
            index,
            beam.token_ids,
            "stop" if beam.has_stopped else "length",
            beam.token_ids[-1] if beam.has_stopped else None,
            first.num_cached_tokens if index == 0 else 0,
            logprobs=_told(beam, self._request.sampling.num_logprobs),
            queued_us=first.queued_us,
            late=first.late,
        )

    def _whole_bill(self) -> SequenceBill:
        its = self._bill
        return SequenceBill(
            int((its.queue_seconds or 0.0) * 1e6),
            its.num_steps,
            its.device_seconds * 1e6,
            its.kv_byte_seconds,
            its.num_saved_tokens,
            its.num_preemptions,
            its.num_recomputed_tokens,
            its.waited_for,
        )


def _best(delta: SequenceDelta) -> list[Scored]:
    """The best tokens at a step's position, best first."""
    assert delta.logprobs is not None
    [told] = read_scores(delta.logprobs)
    return [Scored(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(told.best, 1)]


def _told(beam: Beam, num_best: int) -> TokenLogprobs | None:
    """A beam's log-probabilities as the engine tells them: each token's own, then those of the best."""
    if num_best < 0:
        return None
    rows = [(token, *best[:num_best]) for token, best in zip(beam.tokens, beam.best, strict=True)]
    logprobs = [each.logprob for row in rows for each in row]
    return TokenLogprobs(
        pack_int32([each.token_id for row in rows for each in row]),
        struct.pack(f"<{len(logprobs)}f", *logprobs),
        pack_int32([token.rank for token in beam.tokens]),
    )
