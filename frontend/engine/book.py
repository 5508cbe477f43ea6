"""The book of live requests: which engine has each, and what another engine needs to continue it.

    submitted --deltas--> submitted ... --> finished
        |  ^
        |  | resubmitted to any engine that takes requests, under a new id, with the tokens received so far
        v  |
       lost                  its scheduler is gone, or it was taken from an engine that drains or has lost its workers

A lost request waits for an engine for a limited time; then it fails with `EngineLost`. A request is taken from an
engine only if another one can have it.
"""

import asyncio
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import structlog
from msgspec.structs import replace

from penstock.config.options import SchedulerOptions
from penstock.frontend.engine.engines import Engines
from penstock.frontend.engine.link import EngineLink, QueueGate
from penstock.frontend.engine.roles import prefill_addresses, serving
from penstock.frontend.engine.routing import Router
from penstock.frontend.errors import ApiError, EngineLost, Unavailable
from penstock.ipc import faults
from penstock.ipc.codec import deltas_of, pack_int32, unpack_int32
from penstock.ipc.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    NoteCulprit,
    PauseRequest,
    ResumeRequest,
    SequenceBill,
    SequenceDelta,
    SequenceProgress,
    TokenBatch,
)

log = structlog.get_logger()

_before_tokens = faults.point("frontend.tokens")

RESUME_WAIT_SECONDS = 60.0
"""How long a request that lost its scheduler waits for another scheduler and its worker."""

MAX_DEATHS, DEATH_TOKENS = 2, 4
"""A request that may have caused MAX_DEATHS deaths of workers, without DEATH_TOKENS tokens in between, stays at the
engine where the last one died. That engine finds out whether the request was to blame; others go on with the rest."""

MAX_LOSSES = 3
"""A request lost this often without a token in between may itself be what crashes the scheduler."""

CLOSE_SECONDS = 0.05
"""Time for the sockets' threads to send what is queued."""


class Bill:
    """What the engine spent on a request: the sum over its sequences, as their bills come.

    A sequence's bill comes with its last delta. If the sequence was aborted, it comes up to a few steps later, perhaps
    after the client has been answered.
    """

    __slots__ = (
        "_num_due", "_on_complete", "cache_miss", "device_seconds", "engine", "kv_byte_seconds", "num_accepted_tokens",
        "num_guessed_tokens", "num_preemptions", "num_recomputed_tokens", "num_saved_tokens", "num_steps",
        "queue_seconds", "waited_for",
    )  # fmt: skip

    def __init__(self, num_sequences: int) -> None:
        self._num_due = num_sequences
        self._on_complete: list[Callable[[], None]] = []
        self.engine = ""  # label of the engine that last got the first prompt's sequences; empty if there is only one
        self.queue_seconds: float | None = None  # until the first of its sequences had a row
        self.num_steps = 0
        self.device_seconds = 0.0
        self.kv_byte_seconds = 0.0
        self.num_saved_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_guessed_tokens = self.num_accepted_tokens = 0
        self.waited_for = ""  # why it had no row, if it waited for long
        self.cache_miss = ""  # why its first sequence did not start later in the prompt, where layers keep states

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to come."""
        return self._num_due <= 0

    def add(self, bill: SequenceBill | None) -> None:
        """A sequence has ended; None: its bill is unknown, because its scheduler is gone or refused it."""
        if bill is not None:
            seconds = bill.queued_us * 1e-6
            self.queue_seconds = seconds if self.queue_seconds is None else min(self.queue_seconds, seconds)
            self.num_steps += bill.num_steps
            self.device_seconds += bill.device_us * 1e-6
            self.kv_byte_seconds += bill.kv_byte_seconds
            self.num_saved_tokens += bill.num_saved_tokens
            self.num_preemptions += bill.num_preemptions
            self.num_recomputed_tokens += bill.num_recomputed_tokens
            self.num_guessed_tokens += bill.num_guessed_tokens
            self.num_accepted_tokens += bill.num_accepted_tokens
            self.waited_for = self.waited_for or bill.waited_for
            self.cache_miss = self.cache_miss or bill.cache_miss
        self._num_due -= 1
        if self.is_complete:
            callbacks, self._on_complete = self._on_complete, []
            for callback in callbacks:
                callback()

    def expect(self, num_more: int) -> None:
        """Expect more bills: sequences move to another engine, and what they cost here is billed too."""
        self._num_due += num_more

    def price(self, per_hour: float) -> float:
        """What the device seconds cost at a price per hour."""
        return self.device_seconds * per_hour / 3600

    def when_complete(self, callback: Callable[[], None]) -> None:
        """Call `callback` once nothing more is to come: now, or later."""
        if self.is_complete:
            callback()
        else:
            self._on_complete.append(callback)


class DeltaSink(Protocol):
    """Where the deltas of a submitted request go."""

    @property
    def bill(self) -> Bill:
        """Where the bills of the request's sequences go; it may outlive the sink."""
        ...

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
        "_num_tokens_to_trust",
        "_outputs",
        "_sampler_states",
        "_submitted_at",
        "first_index",
        "is_paused",
        "link",
        "lost_at",
        "num_deaths",
        "num_losses",
        "request",
        "sink",
        "tried",
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
        self.tried: tuple[EngineLink, ...] = ()  # to schedulers whose queues had no room for it
        self.num_deaths = 0  # of workers that it may have caused
        self._num_tokens_to_trust = 0  # tokens that it must still get until it is no longer suspected
        self._num_submissions = 0
        self._submitted_at = 0.0  # first submission
        self._outputs = [array("i") for _ in range(request.n)]
        for known in request.progress:
            self._outputs[known.sequence_idx].extend(unpack_int32(known.token_ids))
        self._num_prompt_logprobs = 0
        self._sampler_states: dict[int, float | None] = {}

    @property
    def is_new(self) -> bool:
        """Whether it was submitted at most once."""
        return self._num_submissions <= 1

    @property
    def known_tokens(self) -> bytes:
        """int32[n]: the prompt, and the outputs of its first unfinished sequence."""
        return self.request.prompt_token_ids + pack_int32(self._outputs[min(self.unfinished, default=0)])

    def lose(self, now: float, *, is_failure: bool = True) -> None:
        """No scheduler has the request any more."""
        self.link = None
        if not self.num_losses:
            self.lost_at = now
        self.num_losses += is_failure

    def suspect(self) -> None:
        """The request may have caused a worker's death."""
        self.num_deaths += 1
        self._num_tokens_to_trust = DEATH_TOKENS * len(self.unfinished)

    def message(self, now: float) -> AddRequest:
        """Return the request as it must be submitted now, under a new id.

        With the new id, late messages from an earlier scheduler or connection match no request.
        """
        request_id = self.request.request_id
        self.wire_id = f"{request_id}#{self._num_submissions}" if self._num_submissions else request_id
        self._num_submissions += 1
        if self._num_submissions == 1:
            self._submitted_at = now
            return self.request
        progress = tuple(
            SequenceProgress(
                idx,
                pack_int32(self._outputs[idx]),
                0 if idx else self._num_prompt_logprobs,
                self._sampler_states.get(idx),
            )
            for idx in sorted(self.unfinished)
        )
        seconds_left = self.request.seconds_left and max(0.001, self.request.seconds_left + self._submitted_at - now)
        ttft_left = self.request.ttft_left and max(0.001, self.request.ttft_left + self._submitted_at - now)
        return replace(
            self.request,
            request_id=self.wire_id,
            progress=progress,
            seconds_left=seconds_left,
            ttft_left=ttft_left,
            num_deaths=self.num_deaths,
        )

    def take(self, delta: SequenceDelta) -> bool:
        """Record a delta; False if its sequence has ended already."""
        idx = delta.sequence_idx
        if idx not in self.unfinished:
            return False
        self.num_losses = 0
        if self.num_deaths:
            self._num_tokens_to_trust -= len(delta.token_ids)
            if self._num_tokens_to_trust <= 0:
                self.num_deaths = 0
        self._outputs[idx].extend(delta.token_ids)
        if delta.sampler_state is not None:
            self._sampler_states[idx] = delta.sampler_state
        if delta.prompt_logprobs is not None:
            self._num_prompt_logprobs += len(delta.prompt_logprobs.ranks) // 4
        if delta.finish_reason is not None:
            self.unfinished.discard(idx)
        return True


def _narrowest(known: Iterable[EngineReady | None]) -> EngineReady | None:
    """The facts of the engine with the tightest limits."""
    return min((facts for facts in known if facts is not None), key=lambda facts: facts.max_model_len, default=None)


class RequestBook(Engines):
    """All live requests of a frontend, over its links. Make it inside the running event loop; it opens the links.

    There is always at least one link: engines may come and go (`join`, `leave`), but the last one stays.
    """

    def __init__(self, links: Sequence[EngineLink], limits: SchedulerOptions, router: Router | None = None) -> None:
        """`limits` bound the queues until the engines report their own. Without a router the first engine gets all."""
        super().__init__()
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, LiveRequest] = {}  # by the ids given to `submit`
        self._submitted: dict[str, LiveRequest] = {}  # requests that are not lost, by their wire ids
        self._owed: dict[tuple[str, int], tuple[EngineLink, Bill]] = {}  # aborted sequences, by wire id and index
        self.queue = QueueGate(limits, lambda: self._able() or self._links)
        """The gate to the engines' queues."""
        self._has_roles = False  # some engine does only prefill or only decode
        for link in links:
            self.join(link)

    @property
    def num_live(self) -> int:
        """Requests with unfinished sequences."""
        return len(self._live)

    @property
    def name(self) -> str:
        """This frontend's name, unique among all frontends."""
        return self._links[0].to.name

    @property
    def facts(self) -> EngineReady | None:
        """Facts that hold whichever engine a request goes to; None while no engine takes requests."""
        return _narrowest(link.facts for link in self._links if link.takes_requests)

    @property
    def last_facts(self) -> EngineReady | None:
        """The same, but kept while no engine takes requests."""
        return self.facts or _narrowest(link.last_facts for link in self._links)

    def join(self, link: EngineLink) -> None:
        """Use one more engine; opens the link."""
        self._links.append(link)
        if self._router is not None:
            self._router.join(link, self.label(link))
        link.open(self)

    async def leave(self, link: EngineLink) -> None:
        """Stop using an engine and close its link; its requests go on at the others, once these are ready.

        Raises:
            ValueError: if it is the last engine, or unknown.
        """
        if len(self._links) == 1:
            raise ValueError("the last link stays")
        self._links.remove(link)
        if self._router is not None:
            self._router.leave(link)
        self.on_readiness(link)
        self._lose(link, is_failure=False)
        link.stop()
        await asyncio.sleep(CLOSE_SECONDS)
        link.close()

    async def wait_ready(self, seconds: float) -> EngineReady:
        """Return the facts, waiting at most `seconds` for an engine to be ready.

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
        if facts is None:  # the engine went away again before this task ran
            raise self._unavailable()
        return facts

    def submit(self, request: AddRequest, sink: DeltaSink, first_index: int = 0) -> None:
        """Send a request; its deltas go to `sink` until each sequence has finished or was aborted.

        If no engine is ready now, the next one to become ready gets the request.

        Raises:
            Unavailable: if the queue to the scheduler is full.
        """
        live = LiveRequest(request, sink, first_index)
        link = self._link_for(live)
        self._live[request.request_id] = live
        if link is None:
            live.lose(self._loop.time())
        elif not self._submit(live, link):
            del self._live[request.request_id]
            raise Unavailable("the queue to the engine is full", retry_after=1)

    def abort(self, request_id: str, sequence_idx: int = -1) -> None:
        """Stop a request, or one sequence of it; no more of its deltas are delivered. Idempotent."""
        live = self._live.get(request_id)
        if live is None or (sequence_idx >= 0 and sequence_idx not in live.unfinished):
            return
        aborted = [*live.unfinished] if sequence_idx < 0 else [sequence_idx]
        live.unfinished.discard(sequence_idx)
        if sequence_idx < 0 or not live.unfinished:
            self._forget(live)
        self._tell_abort(live, sequence_idx, aborted)

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
            if live.link is not None:
                self._begin_work(live.link)
                live.link.send(ResumeRequest(live.wire_id))
            live.is_paused = False

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
            if live is None or not live.take(delta):  # aborted here while the delta was on its way
                if delta.finish_reason is not None:
                    _, bill = self._owed.pop((delta.request_id, delta.sequence_idx), (None, None))
                    if bill is not None:
                        bill.add(delta.bill)
                continue
            if delta.finish_reason is not None:
                if delta.error_code == "queue_full" and self._goes_elsewhere(live, delta):
                    continue
                if not live.unfinished:
                    self._forget(live)
                live.sink.bill.add(delta.bill)
                if delta.error_code == "ends_workers":
                    self._warn_others(live)
            live.sink.push(live.first_index, delta)

    def on_readiness(self, link: EngineLink) -> None:
        self._has_roles = any(each.facts is not None and each.facts.role for each in self._links)
        if any(each.takes_requests for each in self._links):
            self.ready.set()
        else:
            self.ready.clear()
        for each in self._links:
            if not each.takes_requests:
                self._take_from(each)
        self._resubmit()

    def on_suspects(self, wire_ids: Collection[str]) -> None:
        for wire_id in wire_ids:
            if (live := self._submitted.get(wire_id)) is not None:
                live.suspect()

    def _warn_others(self, live: LiveRequest) -> None:
        """Warn the other engines of a request that ends workers, so that they need not find out for themselves."""
        request = live.request
        for link in self._links:
            if link is not live.link:
                link.send(NoteCulprit(request.prompt_token_ids, request.sampling))

    def on_lost(self, link: EngineLink) -> None:
        self._lose(link, is_failure=True)

    def _lose(self, link: EngineLink, *, is_failure: bool) -> None:
        now = self._loop.time()
        if self._router is not None:
            self._router.lost(link)
        for name in [name for name, (owing, _) in self._owed.items() if owing is link]:
            self._owed.pop(name)[1].add(None)
        for live in [live for live in self._live.values() if live.link is link]:
            del self._submitted[live.wire_id]
            self._leave_engine(live)
            live.lose(now, is_failure=is_failure)
            if live.num_losses > MAX_LOSSES:
                self._fail(live, f"the engine was lost {live.num_losses} times without a token of the request")
        self._resubmit()

    def on_beat(self) -> None:
        now = self._loop.time()
        for live in list(self._live.values()):
            if live.link is None and now - live.lost_at > RESUME_WAIT_SECONDS:
                self._fail(live, "the engine was lost in the middle of the request and did not come back in time")
        self._resubmit()

    def is_waiting_for(self, link: EngineLink) -> bool:
        return self._has_work(link) or (not link.is_draining and self._has_work(None))

    # --- submitting ---------------------------------------------------------------------------

    def _has_work(self, link: EngineLink | None) -> bool:
        """Whether an engine has requests that are not paused; with None, whether such requests wait for an engine."""
        return any(not live.is_paused and live.link is link for live in self._live.values())

    def _begin_work(self, link: EngineLink) -> None:
        """Called before an engine gets a request, or resumes one."""
        if not self._has_work(link):
            link.begin_work()

    def _submit(self, live: LiveRequest, link: EngineLink) -> bool:
        message = live.message(self._loop.time())
        if self._has_roles:
            message = replace(message, prefill_at=prefill_addresses(self._links, link))
        if not link.send(message):
            return False
        self._begin_work(link)
        live.link = link
        if not live.first_index:
            live.sink.bill.engine = link.to.label
        link.sent.add(message.tenant, message.n, message.n * len(message.prompt_token_ids) // 4)
        self._submitted[live.wire_id] = live
        if self._router is not None:
            self._router.sent(live, link)
        if live.is_paused:
            link.send(PauseRequest(live.wire_id))
        return True

    def _able(self) -> list[EngineLink]:
        """The links to engines that a request may go to now."""
        links = [link for link in self._links if link.takes_requests]
        return serving(links) if self._has_roles else links

    def _link_for(self, live: LiveRequest) -> EngineLink | None:
        links = self._able()
        if not links or self._router is None:
            return links[0] if links else None
        return self._router.choose(live, links)

    def _goes_elsewhere(self, live: LiveRequest, delta: SequenceDelta) -> bool:
        """An engine's queue had no room for a request: offer it to another engine. False if all were tried."""
        if self._router is None or live.link is None:
            return False
        live.tried = *live.tried, live.link
        if all(link in live.tried for link in self._able()):
            return False
        self._router.refused(live.link)
        live.link.sent.num_ended += live.request.n
        live.unfinished.add(delta.sequence_idx)  # its other sequences were refused too; those deltas will be ignored
        del self._submitted[live.wire_id]
        self._leave_engine(live)
        live.lose(self._loop.time(), is_failure=False)
        self._resubmit()
        return True

    def _leave_engine(self, live: LiveRequest) -> None:
        if self._router is not None:
            self._router.gone(live)

    def _take_from(self, link: EngineLink) -> None:
        """Take all requests from an engine that accepts none any more, if another one can have them."""
        if not self.ready.is_set():
            return
        here = [live for live in self._live.values() if live.link is link]
        for live in [live for live in here if live.num_deaths < MAX_DEATHS]:
            live.sink.bill.expect(len(live.unfinished))
            self._tell_abort(live, -1, [*live.unfinished])
            del self._submitted[live.wire_id]
            self._leave_engine(live)
            live.link = None
            live.lost_at = self._loop.time()

    def _tell_abort(self, live: LiveRequest, sequence_idx: int, aborted: Sequence[int]) -> None:
        """Tell a request's engine that one of its sequences (-1: all) is aborted; their bills are still to come."""
        link, bill = live.link, live.sink.bill
        is_told = link is not None and link.send(AbortRequest(live.wire_id, sequence_idx))
        for idx in aborted:
            if link is not None and is_told:
                self._owed[live.wire_id, idx] = link, bill
            else:
                bill.add(None)

    def _resubmit(self) -> None:
        """Let ready engines continue lost requests, oldest first."""
        if len(self._submitted) == len(self._live):
            return
        num_submitted = 0
        for live in [live for live in self._live.values() if live.link is None]:
            link = self._link_for(live)
            if link is None or not self._submit(live, link):
                break  # the queue is full, or there is no engine: the rest follows later
            num_submitted += 1
        if num_submitted:
            log.info("requests resubmitted", num_requests=num_submitted)

    def _fail(self, live: LiveRequest, message: str) -> None:
        self._forget(live)
        for _ in live.unfinished:
            live.sink.bill.add(None)
        live.sink.fail(EngineLost(message, retry_after=1))

    def _forget(self, live: LiveRequest) -> None:
        if live.link is not None:
            live.link.sent.num_ended += live.request.n
        del self._live[live.request.request_id]
        self._submitted.pop(live.wire_id, None)
        self._leave_engine(live)
