"""The book of live requests: which engine has which, and what another engine needs to continue it.

    submitted --deltas--> submitted ... --> finished
        |  ^
        |  | resubmitted to any engine that is ready, under a new id, with the tokens received so far
        v  |
       lost                                                 (its scheduler is gone)

A lost request waits for an engine for a limited time; then it fails with `EngineLost`.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from msgspec.structs import replace

from penstock.frontend.engine.link import EngineLink, QueueGate
from penstock.frontend.errors import ApiError, EngineLost, Unavailable
from penstock.ipc import faults
from penstock.ipc.codec import deltas_of, pack_int32
from penstock.ipc.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    EngineStats,
    PauseRequest,
    ResetPrefixCache,
    ResumeRequest,
    SequenceDelta,
    SequenceProgress,
    TokenBatch,
)

log = structlog.get_logger()

_before_tokens = faults.point("frontend.tokens")

RESUME_WAIT_SECONDS = 60.0
"""How long a request that lost its scheduler waits for another scheduler and its worker."""

MAX_LOSSES = 3
"""A request lost this often without a token in between may itself be what crashes the scheduler."""

CLOSE_SECONDS = 0.05
"""Time for the sockets' threads to send what is queued."""


class DeltaSink(Protocol):
    """Where the deltas of a submitted request go."""

    def push(self, first_index: int, delta: SequenceDelta) -> None:
        """Take a delta of sequence `first_index + delta.sequence_idx`."""
        ...

    def fail(self, error: ApiError) -> None:
        """The request will get no more deltas."""
        ...


class LiveRequest:
    """A submitted request with unfinished sequences. What was pushed to the sink is never requested again."""

    __slots__ = (
        "_num_prompt_logprobs",
        "_num_submissions",
        "_outputs",
        "_submitted_at",
        "first_index",
        "is_paused",
        "link",
        "lost_at",
        "num_losses",
        "request",
        "sink",
        "unfinished",
        "wire_id",
    )

    def __init__(self, request: AddRequest, sink: DeltaSink, first_index: int) -> None:
        self.request = request
        self.sink = sink
        self.first_index = first_index
        self.unfinished = set(range(request.n))
        self.wire_id = ""  # its id at the scheduler
        self.link: EngineLink | None = None  # to the scheduler that has it; None: lost
        self.is_paused = False  # its client reads too slowly
        self.lost_at = 0.0  # time of the first loss since its last token
        self.num_losses = 0  # since its last token
        self._num_submissions = 0
        self._submitted_at = 0.0  # first
        self._outputs = [array("i") for _ in range(request.n)]
        self._num_prompt_logprobs = 0

    def lose(self, now: float) -> None:
        """No scheduler has it any more."""
        self.link = None
        if not self.num_losses:
            self.lost_at = now
        self.num_losses += 1

    def message(self, now: float) -> AddRequest:
        """Return the request as it must be submitted now, under a new id.

        Messages from an earlier scheduler or connection then match no request.
        """
        request_id = self.request.request_id
        self.wire_id = f"{request_id}#{self._num_submissions}" if self._num_submissions else request_id
        self._num_submissions += 1
        if self._num_submissions == 1:
            self._submitted_at = now
            return self.request
        progress = tuple(
            SequenceProgress(idx, pack_int32(self._outputs[idx]), 0 if idx else self._num_prompt_logprobs)
            for idx in sorted(self.unfinished)
        )
        seconds_left = self.request.seconds_left and max(0.001, self.request.seconds_left + self._submitted_at - now)
        return replace(self.request, request_id=self.wire_id, progress=progress, seconds_left=seconds_left)

    def take(self, delta: SequenceDelta) -> bool:
        """Record a delta; False if its sequence has ended already."""
        idx = delta.sequence_idx
        if idx not in self.unfinished:
            return False
        self.num_losses = 0
        self._outputs[idx].extend(delta.token_ids)
        if delta.prompt_logprobs is not None:
            self._num_prompt_logprobs += len(delta.prompt_logprobs.ranks) // 4
        if delta.finish_reason is not None:
            self.unfinished.discard(idx)
        return True


Choose = Callable[[Sequence[EngineLink]], EngineLink | None]
"""Returns the engine for a request; None if it must wait. Called often, and must have no side effects."""


def first_ready(links: Sequence[EngineLink]) -> EngineLink | None:
    """The first engine that is ready."""
    return next((link for link in links if link.facts is not None), None)


class RequestBook:
    """All live requests of a frontend, over its links. Make it inside the running event loop; it opens the links."""

    def __init__(self, links: Sequence[EngineLink], choose: Choose = first_ready) -> None:
        self._links = links
        self._choose = choose
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, LiveRequest] = {}  # by the ids that they were submitted with
        self._submitted: dict[str, LiveRequest] = {}  # those that are not lost, by their wire ids
        self.ready = asyncio.Event()
        """Set while an engine is ready."""
        for link in links:
            link.open(self)

    @property
    def num_live(self) -> int:
        """Requests with unfinished sequences."""
        return len(self._live)

    @property
    def name(self) -> str:
        """This frontend's, unique among all."""
        return self._links[0].to.name

    @property
    def link(self) -> EngineLink:
        """The link to the engine that a request would go to, or wait for."""
        return self._choose(self._links) or self._links[0]

    @property
    def facts(self) -> EngineReady | None:
        """The facts of that engine; None while none is ready."""
        return self.link.facts

    @property
    def last_facts(self) -> EngineReady | None:
        """The same, but kept while none is ready."""
        return self.link.last_facts

    @property
    def stats(self) -> EngineStats | None:
        """The latest statistics of that engine."""
        return self.link.stats

    @property
    def all_stats(self) -> dict[str, EngineStats]:
        """The latest statistics of each engine, by its label."""
        return {str(index): link.stats for index, link in enumerate(self._links) if link.stats is not None}

    @property
    def queue(self) -> QueueGate:
        """The gate to that engine's queue."""
        return self.link.queue

    @property
    def not_ready_reason(self) -> str:
        """Why no engine is ready."""
        return self.link.not_ready_reason

    @property
    def stuck_seconds(self) -> float:
        """How long an engine that says it is ready has computed nothing although there is work for it here."""
        return max(link.stuck_seconds for link in self._links)

    @property
    def silent_seconds(self) -> float:
        """How long an engine that was once there has been silent, although there is work and no other engine."""
        return 0.0 if self.ready.is_set() else max(link.silent_seconds for link in self._links)

    async def wait_ready(self, seconds: float) -> EngineReady:
        """Return an engine's facts, waiting for them at most this long.

        Raises:
            Unavailable: if no engine is ready by then.
        """
        if self.facts is None:
            for link in self._links:
                link.miss()
            try:
                async with asyncio.timeout(seconds):
                    await self.ready.wait()
            except TimeoutError:
                raise self._unavailable() from None
        facts = self.facts
        if facts is None:  # it went away again before this task ran
            raise self._unavailable()
        return facts

    def reset_prefix_cache(self) -> None:
        """Make the schedulers drop all cached pages that no sequence uses.

        Raises:
            Unavailable: if no engine is there, or the queue to a scheduler is full.
        """
        sent = [link.send(ResetPrefixCache()) for link in self._links if link.facts is not None]
        if not sent or not all(sent):
            raise self._unavailable()

    def submit(self, request: AddRequest, sink: DeltaSink, first_index: int = 0) -> None:
        """Send a request; its deltas go to `sink` until each sequence has finished or was aborted.

        If no engine is ready at this moment, the next one to become ready gets it.

        Raises:
            Unavailable: if the queue to the scheduler is full.
        """
        link = self._choose(self._links)
        self._begin_work(link)
        live = self._live[request.request_id] = LiveRequest(request, sink, first_index)
        if link is None:
            live.lose(self._loop.time())
        elif not self._submit(live, link):
            del self._live[request.request_id]
            raise Unavailable("the queue to the engine is full", retry_after=1)

    def abort(self, request_id: str, sequence_idx: int = -1) -> None:
        """Stop a request, or one sequence of it; none of its deltas is delivered any more. Idempotent."""
        live = self._live.get(request_id)
        if live is None or (sequence_idx >= 0 and sequence_idx not in live.unfinished):
            return
        live.unfinished.discard(sequence_idx)
        if sequence_idx < 0 or not live.unfinished:
            self._forget(live)
        if live.link is not None:
            live.link.send(AbortRequest(live.wire_id, sequence_idx))

    def pause(self, request_id: str) -> None:
        """Make the engine give a request's rows and pages to others until `resume`. Idempotent."""
        live = self._live.get(request_id)
        if live is not None and not live.is_paused:
            live.is_paused = True
            if live.link is not None:
                live.link.send(PauseRequest(live.wire_id))

    def resume(self, request_id: str) -> None:
        """Continue a paused request. Idempotent."""
        live = self._live.get(request_id)
        if live is not None and live.is_paused:
            self._begin_work(live.link)
            live.is_paused = False
            if live.link is not None:
                live.link.send(ResumeRequest(live.wire_id))

    async def close(self) -> None:
        """Say goodbye and close the links; live requests get no more deltas."""
        self._live.clear()
        self._submitted.clear()
        for link in self._links:
            link.stop()
        await asyncio.sleep(CLOSE_SECONDS)
        for link in self._links:
            link.close()

    # --- what the links tell ------------------------------------------------------------------

    def on_tokens(self, batch: TokenBatch) -> None:
        _before_tokens()
        requests = self._submitted
        for delta in deltas_of(batch):
            live = requests.get(delta.request_id)
            if live is None or not live.take(delta):
                continue  # aborted here while the delta was on its way
            if not live.unfinished:
                self._forget(live)
            live.sink.push(live.first_index, delta)

    def on_ready(self, link: EngineLink) -> None:
        self.ready.set()
        self._resubmit()

    def on_not_ready(self, link: EngineLink) -> None:
        if all(each.facts is None for each in self._links):
            self.ready.clear()

    def on_lost(self, link: EngineLink) -> None:
        now = self._loop.time()
        for live in [live for live in self._live.values() if live.link is link]:
            del self._submitted[live.wire_id]
            live.lose(now)
            if live.num_losses > MAX_LOSSES:
                self._fail(live, f"the engine was lost {live.num_losses} times without a token of the request")
        self._resubmit()

    def on_beat(self) -> None:
        now = self._loop.time()
        for live in list(self._live.values()):
            if live.link is None and now - live.lost_at > RESUME_WAIT_SECONDS:
                self._fail(live, "the engine was lost in the middle of the request and did not come back in time")
        self._resubmit()

    def is_waiting_for(self, link: EngineLink | None) -> bool:
        return any(not live.is_paused and live.link in (link, None) for live in self._live.values())

    # --- submitting ---------------------------------------------------------------------------

    def _begin_work(self, link: EngineLink | None) -> None:
        if link is not None and not self.is_waiting_for(link):
            link.begin_work()

    def _submit(self, live: LiveRequest, link: EngineLink) -> bool:
        message = live.message(self._loop.time())
        if not link.send(message):
            return False
        live.link = link
        self._submitted[live.wire_id] = live
        if live.is_paused:
            link.send(PauseRequest(live.wire_id))
        return True

    def _resubmit(self) -> None:
        """Let ready engines continue lost requests, oldest first."""
        if len(self._submitted) == len(self._live):
            return
        num_submitted = 0
        for live in [live for live in self._live.values() if live.link is None]:
            link = self._choose(self._links)
            if link is None or not self._submit(live, link):
                break  # the queue is full, or there is no engine: the rest follows
            num_submitted += 1
        if num_submitted:
            log.info("requests resubmitted", num_requests=num_submitted)

    def _fail(self, live: LiveRequest, message: str) -> None:
        self._forget(live)
        live.sink.fail(EngineLost(message, retry_after=1))

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request.request_id]
        self._submitted.pop(live.wire_id, None)

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"no engine is ready: {self.not_ready_reason}", retry_after=5)
