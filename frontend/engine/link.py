"""The connection to one engine: hello, heartbeats, readiness, and how much waits in its queue.

    connect --hello--> (nothing yet) --EngineReady--> ready <--> EngineNotReady: its requests stay where they are
                  ^                                     |
                  `-- SayHello (the scheduler does not know us), or silence for heartbeat_timeout
                      (then over a new socket): the requests that it had are lost

The scheduler may start later, disappear and come back. `book.py` decides what happens to the requests.

The queue gate refuses a request before anything expensive is done for it. The scheduler has the last word
(`core/sequences/intake.py`). Its reports about its queue are up to a fraction of a second old, so the gate adds the
requests that this frontend has admitted since the last report, and those that are still being tokenized: they hold a
`Place`.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from math import ceil
from typing import Any, Literal, Protocol, Self

import structlog
from msgspec.structs import replace

from penstock.config.options import SchedulerOptions
from penstock.frontend.engine.connection import Connect, EngineAddress
from penstock.frontend.errors import Overloaded
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    AnyAnswer,
    AnyQuestion,
    CacheEvents,
    EngineNotReady,
    EngineReady,
    EngineStats,
    ExpertLoad,
    FrontendHello,
    Goodbye,
    Heartbeat,
    Message,
    Refused,
    SayHello,
    ToFrontend,
    TokenBatch,
)
from penstock.ipc.queue_turns import WaitingCounts

log = structlog.get_logger()


EngineState = Literal["ready", "draining", "drained", "not ready"]


class LinkUser(Protocol):
    """The owner of requests at an engine."""

    def on_tokens(self, batch: TokenBatch) -> None:
        """Output of requests."""
        ...

    def on_readiness(self, link: "EngineLink") -> None:
        """The engine has begun or stopped taking requests. It keeps those that it has."""
        ...

    def on_suspects(self, wire_ids: Collection[str]) -> None:
        """A worker has died, and one of these requests, which may be of any frontend, may be the cause."""
        ...

    def on_lost(self, link: "EngineLink") -> None:
        """The engine has lost all requests that it was sent."""
        ...

    def on_beat(self) -> None:
        """Called every `heartbeat_interval`."""
        ...

    def is_waiting_for(self, link: "EngineLink") -> bool:
        """Whether there is work for this engine."""
        ...


class Load:
    """Requests that were sent to an engine since its last report."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int]] = []  # tenant and number of sequences of each
        self.num_seqs = 0
        self.num_tokens = 0
        self.num_ended = 0  # sequences that have ended since, of these or older requests

    def add(self, tenant: str, num_seqs: int, num_tokens: int) -> None:
        """Count a request."""
        self.requests.append((tenant, num_seqs))
        self.num_seqs += num_seqs
        self.num_tokens += num_tokens


class EngineLink:
    """One connection to one scheduler. Make it inside the running event loop, then `open` it."""

    def __init__(
        self,
        to: EngineAddress,
        connect: Connect,
        on_refused: Callable[[str], None],
    ) -> None:
        self.to = to
        self.facts: EngineReady | None = None
        """The engine's facts while it is ready; None while no worker is serving."""
        self.last_facts: EngineReady | None = None
        """The same, but kept while the engine is not ready."""
        self.stats: EngineStats | None = None
        self.expert_load: ExpertLoad | None = None
        self.is_draining = False
        """The engine finishes or gives away its requests, and takes no new ones."""
        self.sent = Load()
        """This frontend's requests that `stats` does not include yet."""
        self.not_ready_reason = "the engine has not answered yet"
        self.on_cache_events: Callable[[CacheEvents], None] | None = None
        """Called with what the engine has cached. Set it before `open`."""
        self.listeners: dict[type[Message], Callable[[Any], None]] = {}
        """Called with messages of these types, which are no answers: a part asks for them."""
        self.on_hello: list[Callable[[], object]] = []
        """Called behind each hello: for what the engine must know before it gets requests."""
        self._connect_to = connect
        self._on_refused = on_refused
        self._num_asked = 0
        self._asked: dict[int, asyncio.Future[AnyAnswer]] = {}
        self._loop = asyncio.get_running_loop()
        self._progress_at = self._loop.time()  # last sign of steps being computed, or of there being nothing to compute
        self._silent_since: float | None = None  # when a scheduler that was given up sent its last message
        self._is_missed = False  # there has been work for that scheduler since then

    def open(self, user: LinkUser) -> None:
        """Connect; `user` gets the events from now on."""
        self._user = user
        self._connect()
        self._heartbeats = asyncio.create_task(self._keep_alive())

    @property
    def which(self) -> dict[str, str]:
        """The engine's fields in log lines: its label, if there are several engines."""
        return {"engine": self.to.label} if self.to.label else {}

    @property
    def takes_requests(self) -> bool:
        """Whether the engine is ready, and not draining."""
        return self.facts is not None and not self.is_draining

    @property
    def stuck_seconds(self) -> float:
        """How long an engine that reports it is ready has computed nothing, although it has work from here."""
        is_waited_for = self.facts is not None and self._user.is_waiting_for(self)
        return self._loop.time() - self._progress_at if is_waited_for else 0.0

    @property
    def silent_seconds(self) -> float:
        """How long a scheduler that was connected before has been silent, although there was work for it."""
        if self._silent_since is None or not (self._is_missed or self._user.is_waiting_for(self)):
            return 0.0
        return self._loop.time() - self._silent_since

    @property
    def state(self) -> EngineState:
        """The engine's state as shown to administrators."""
        if self.facts is None:
            return "not ready"
        if not self.is_draining:
            return "ready"
        stats = self.stats
        is_told = stats is not None and stats.is_draining
        if stats is None or not is_told or stats.num_running or stats.num_waiting or stats.num_paused:
            return "draining"
        return "drained"

    def begin_work(self) -> None:
        """The engine gets work after having none: from now on it should make progress."""
        self._progress_at = self._loop.time()

    def miss(self) -> None:
        """A request is waiting for this engine to be ready."""
        self._is_missed = True

    def send(self, message: Message) -> bool:
        """Queue a message; False if the queue to the scheduler is full."""
        self._last_sent = self._loop.time()
        return self._channel.send(message)

    async def ask(self, question: AnyQuestion, seconds: float) -> AnyAnswer | None:
        """Ask the engine something; the question's number is set here. None if it does not answer in time."""
        number = self._num_asked = self._num_asked + 1
        answer: asyncio.Future[AnyAnswer] = self._loop.create_future()
        self._asked[number] = answer
        try:
            if not self.send(replace(question, number=number)):
                return None
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._asked[number]

    def stop(self) -> None:
        """Say goodbye; call `close` once there was time to send what is queued."""
        self._heartbeats.cancel()
        self.send(Goodbye())

    def close(self) -> None:
        """Close the connection; what is queued in it is dropped."""
        self._channel.close()

    def _connect(self) -> None:
        self._last_heard = self._loop.time()
        self._has_heard = False
        self._channel = self._connect_to(self.to, self._on_message, self._on_broken)
        self._say_hello()

    def _say_hello(self) -> None:
        wants_cache = self.on_cache_events is not None
        self.send(FrontendHello(PROTOCOL_VERSION, self.to.name, self.to.model_fingerprint, wants_cache))
        for tell in self.on_hello:
            tell()

    def _on_message(self, message: ToFrontend) -> None:
        self._last_heard = self._loop.time()
        if not self._has_heard:
            self._has_heard, self._silent_since = True, None
        if type(message) is TokenBatch:
            self._progress_at = self._last_heard
            self._user.on_tokens(message)
        else:
            self._on_news(message)

    def _on_news(self, message: ToFrontend) -> None:
        match message:
            case EngineReady():
                self._on_ready(message)
            case EngineNotReady():
                self.is_draining = message.is_draining
                self._set_not_ready(message.reason, message.suspects)
            case SayHello():
                self._set_not_ready("the engine was restarted", is_lost=True)
                self._say_hello()
            case EngineStats():
                if self.stats is None or self.stats.num_steps != message.num_steps:
                    self._progress_at = self._last_heard
                self.stats, self.sent = message, Load()
            case ExpertLoad():
                self.expert_load = message
            case CacheEvents():
                if self.on_cache_events is not None:
                    self.on_cache_events(message)
            case AnyAnswer():
                if (answer := self._asked.get(message.number)) is not None and not answer.done():
                    answer.set_result(message)
            case Refused():
                log.error("refused by the scheduler", reason=message.reason)
                self._on_refused(message.reason)
            case _:
                if (listener := self.listeners.get(type(message))) is not None:
                    listener(message)

    def _on_ready(self, facts: EngineReady) -> None:
        if self.facts is None:
            self._progress_at = self._last_heard
            log.info("engine ready", max_model_len=facts.max_model_len, num_pages=facts.num_pages, **self.which)
        if facts.is_draining and not self.is_draining:
            log.info("engine draining", **self.which)
        self.facts = self.last_facts = facts
        self.is_draining = facts.is_draining
        self._user.on_readiness(self)

    def _set_not_ready(self, reason: str, suspects: Collection[str] = (), *, is_lost: bool = False) -> None:
        if self.facts is not None:
            self._user.on_suspects(suspects)
            log.warning("engine not ready", reason=reason, **self.which)
        self.facts = None
        self.not_ready_reason = reason
        if is_lost:
            self.is_draining = False  # the lost scheduler drained; the next one does not
            self.stats, self.sent = None, Load()  # they were about the lost scheduler
            self._user.on_lost(self)
        self._user.on_readiness(self)

    async def _keep_alive(self) -> None:
        to = self.to
        while True:
            await asyncio.sleep(to.heartbeat_interval)
            self._user.on_beat()
            now = self._loop.time()
            if now - self._last_heard > to.heartbeat_timeout:
                self._on_silence()
            elif now - self._last_sent >= to.heartbeat_interval * 0.9:
                self.send(Heartbeat())

    def _on_silence(self) -> None:
        if self._has_heard:
            log.warning("engine silent, reconnecting", seconds=self.to.heartbeat_timeout, **self.which)
        self._give_up("the engine is silent")

    def _on_broken(self) -> None:
        """The scheduler has ended, or the network has failed; if nothing was heard yet, the socket keeps trying."""
        if self._has_heard:
            log.warning("connection to the engine lost, reconnecting", **self.which)
            self._give_up("the connection to the engine is lost")

    def _give_up(self, reason: str) -> None:
        """Drop the connection, so that what is queued in it cannot reach another scheduler. Then reconnect."""
        if self._has_heard:
            self._silent_since, self._is_missed = self._last_heard, self._user.is_waiting_for(self)
        self._set_not_ready(reason, is_lost=True)
        self._channel.close()
        self._connect()


# --- the engines' queues ---------------------------------------------------------------------------

UNKNOWN_RETRY_SECONDS, MAX_RETRY_SECONDS = 5, 120


def retry_after(stats: Sequence[EngineStats], num_seqs: int, num_tokens: int = 0) -> int:
    """Whole seconds until so many sequences and tokens have left these engines' queues at the current rate, at least 1.

    1 if no engine has reported anything.
    """
    if not stats:
        return 1
    rates = (
        (num_seqs, sum(each.drained_seqs_per_second for each in stats)),
        (num_tokens, sum(each.drained_tokens_per_second for each in stats)),
    )
    seconds = max(num / rate if rate > 0 else UNKNOWN_RETRY_SECONDS for num, rate in rates if num > 0)
    return min(max(ceil(seconds), 1), MAX_RETRY_SECONDS)


class Queued(Protocol):
    """An engine that has a queue (`EngineLink`)."""

    last_facts: EngineReady | None  # with its limits
    stats: EngineStats | None  # its last report
    sent: Load  # what it was sent since then


class QueueGate:
    """Limits the queue by sequences, by prompt tokens (a prompt with `n` sequences counts `n` times), and by turns.

    The queues of several engines count as one: their waiting requests are added up, and so are their limits.
    """

    def __init__(self, options: SchedulerOptions, engines: Callable[[], Sequence[Queued]]) -> None:
        """`engines` returns the engines at which a request may wait.

        `options` apply until an engine reports its own: a frontend that was started alone does not know them.
        """
        self._options = options
        self._engines = engines
        self._reserved = WaitingCounts()  # admitted, but not submitted yet
        self._num_reserved = 0  # sequences, and their tokens
        self._num_reserved_tokens = 0
        self._counts = WaitingCounts()  # all that waits, as far as known here
        self._counted: list[tuple[EngineStats | None, Load, int]] = []  # of each engine, with how many requests

    @property
    def stats(self) -> list[EngineStats]:
        """The engines' last reports."""
        return [each.stats for each in self._engines() if each.stats is not None]

    def check(self, num_seqs: int = 1, num_tokens: int = 0, tenant: str | None = None) -> None:
        """Refuse a request that would not fit, or would wait too long for its turn. No tenant: as for the busiest one.

        A request that finds the queue empty is admitted, however many tokens it has.

        Raises:
            Overloaded: with the seconds until there should be room.
        """
        engines = self._engines()
        told = [each.stats for each in engines if each.stats is not None]
        sent = [each.sent for each in engines if each.stats is not None]
        num_ended = sum(each.num_ended for each in sent)
        num_free_rows = sum(each.num_rows - each.num_running for each in told if not each.num_waiting)
        num_waiting = sum(each.num_waiting for each in told) + sum(each.num_seqs for each in sent) + self._num_reserved
        num_waiting -= num_ended + num_free_rows  # requests sent since the reports went straight to free rows
        num_tokens_waiting = sum(each.num_waiting_tokens for each in told)
        num_tokens_waiting += sum(each.num_tokens for each in sent) + self._num_reserved_tokens
        if told and num_waiting <= 0:
            num_tokens_waiting = 0
        counts = self._up_to_date(engines)
        if tenant is None:
            tenant = counts.busiest()
        is_beside_others = bool(counts) and tenant not in counts
        max_seqs, max_tokens = self._limits(engines)
        max_seqs *= 2 if is_beside_others else 1  # as in core/sequences/intake.py
        excess = num_waiting + num_seqs - max_seqs
        if excess > 0:
            raise Overloaded(
                f"the queue is full: {num_waiting} sequences are waiting, the limit is {max_seqs}",
                retry_after=retry_after(told, excess),
            )
        excess_tokens = num_tokens_waiting + num_tokens - max_tokens
        if num_tokens_waiting > 0 and excess_tokens > 0:
            raise Overloaded(
                f"the queue is full: its prompts have {num_tokens_waiting} tokens, the limit is {max_tokens}",
                retry_after=retry_after(told, 0, excess_tokens),
            )
        if told and num_waiting > 0 and all(each.max_turns for each in told):
            max_turns = sum(each.max_turns for each in told)
            num_turns = counts.turns_before(tenant) - num_free_rows - num_ended
            if num_turns >= max_turns:
                raise Overloaded(
                    f"the queue is too long: {num_turns} others would have their turn before; at most {max_turns} may",
                    retry_after=retry_after(told, num_turns + 1 - max_turns),
                )

    def reserve(self, num_seqs: int, num_tokens: int, tenant: str) -> "Place":
        """Reserve room while a request is validated and tokenized; `num_tokens` is an upper bound from its bytes.

        Raises:
            Overloaded: if there is no room.
        """
        return Place(self, num_seqs, num_tokens, tenant)

    def note_reserved(self, tenant: str, num_seqs: int, num_tokens: int, num_groups: int) -> None:
        """Count what was reserved, or with negative numbers what is given back."""
        self._num_reserved += num_seqs
        self._num_reserved_tokens += num_tokens
        self._reserved.add(tenant, num_seqs, num_groups)
        self._counts.add(tenant, num_seqs, num_groups)

    def _limits(self, engines: Sequence[Queued]) -> tuple[int, int]:
        """The limits for sequences and tokens: the engines' own, or those of the options while they are unknown."""
        options, facts = self._options, [each.last_facts for each in engines]
        return (
            sum((each is not None and each.max_num_queued_seqs) or options.max_num_queued_seqs for each in facts),
            sum((each is not None and each.max_num_queued_tokens) or options.max_num_queued_tokens for each in facts),
        )

    def _up_to_date(self, engines: Sequence[Queued]) -> WaitingCounts:
        """How much waits for each tenant, as far as known here.

        Counted anew after a report; otherwise only what was sent since the last call is added: a flood of requests
        that are refused must not cost the time of all tenants for each of them.
        """
        counted = self._counted
        if len(counted) != len(engines) or any(
            each.stats is not stats or each.sent is not sent
            for each, (stats, sent, _) in zip(engines, counted, strict=True)
        ):
            self._counts = WaitingCounts(self._reserved.tenants())
            for each in engines:
                for waiting in () if each.stats is None else each.stats.waiting_tenants:
                    self._counts.add(waiting.tenant, waiting.num_seqs, waiting.num_groups)
            counted = [(each.stats, each.sent, 0) for each in engines]
        for _, sent, num_known in counted:
            for tenant, num_seqs in sent.requests[num_known:]:
                self._counts.add(tenant, num_seqs, 1)
        self._counted = [(stats, sent, len(sent.requests)) for stats, sent, _ in counted]
        return self._counts


class Place:
    """A request's place in front of the queue, until the engine has the request. Use it in a `with`."""

    def __init__(self, gate: QueueGate, num_seqs: int, num_tokens: int, tenant: str) -> None:
        """As `QueueGate.reserve`."""
        self._gate = gate
        self._held: tuple[str, int, int] | None = None
        self.resize(num_seqs, num_tokens, tenant)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def resize(self, num_seqs: int, num_tokens: int, tenant: str) -> None:
        """Take a place of this size for this tenant instead. The gate is not asked if it is the same.

        Raises:
            Overloaded: if there is no room; the old place is given back, too.
        """
        asked = tenant, num_seqs, num_tokens
        if asked != self._held:
            self.give_back()
            self._gate.check(num_seqs, num_tokens, tenant)
            self._gate.note_reserved(*asked, 1)
            self._held = asked

    def give_back(self) -> None:
        """Hold nothing any more. Idempotent."""
        if self._held is not None:
            tenant, num_seqs, num_tokens = self._held
            self._held = None
            self._gate.note_reserved(tenant, -num_seqs, -num_tokens, -1)
