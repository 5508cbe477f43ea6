"""Lets a waiting request with a grammar enter a row only once the worker has prepared the grammar.

    head of the queue ── admits? ──▶ ready: it enters
                             │ not yet: the worker is asked once per text, the request is held beside the queue
                             ▼
    PrepareGrammar ──▶ worker, beside its steps ──▶ GrammarPrepared: held requests are queued again

A grammar is live from the time the worker is asked for it until no request needs it. Live grammars are limited in
number and in bytes, to bound the worker's memory; a request that finds no room is held until there is some. Pure
bookkeeping, like the scheduler that owns it.

A worker may die of the grammar that it is preparing, or of the step that it computes meanwhile: see `trials.py`.
"""

from operator import attrgetter
from typing import TYPE_CHECKING, Self

from penstock.core.kv.kv_pages import Start
from penstock.core.scheduling.answers import FromAll
from penstock.core.scheduling.part import Ending
from penstock.core.scheduling.room_gate import RoomGate
from penstock.core.scheduling.step_record import GRAMMAR
from penstock.core.scheduling.trials import ENDS_WORKERS, Trials
from penstock.core.sequences.limits import WorkerLimits
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.parts.grammars.messages import DropGrammar, GrammarPrepared, PrepareGrammar

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler

MAX_BYTES = 1 << 30
"""Limit over all live grammars in the worker, by their estimated sizes."""

BYTES_IN_USE = 4 << 20
"""Bytes that an ordinary grammar's automaton grows beyond its initial size while rows use it."""


class _Live:
    """A grammar that the worker has, or is preparing."""

    __slots__ = ("grammar_id", "is_ready", "num_bytes", "text", "users")

    def __init__(self, grammar_id: int, text: str, num_bytes: int) -> None:
        self.grammar_id = grammar_id
        self.text = text
        self.num_bytes = num_bytes
        self.users: dict[Request, None] = {}
        self.is_ready = False


class GrammarGate(RoomGate):
    """The live grammars of one scheduler. Requests that are paused or have ended must `leave`."""

    __slots__ = ("_ids", "_live", "_max_live", "_num_bytes")

    answers = ((GrammarPrepared, lambda: FromAll(attrgetter("grammar_id"))),)

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self:
        if before is None:
            return cls(scheduler.waiting, scheduler.limits.max_num_seqs, scheduler.trials)
        return before

    def __init__(self, waiting: WaitingQueue, max_live: int, trials: Trials) -> None:
        super().__init__(waiting, trials)
        self._max_live = max_live
        self._live: dict[str, _Live] = {}  # by text, in the order in which the worker was asked for them
        self._ids: dict[int, _Live] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._live)

    def admits(self, seq: Sequence, start: Start) -> bool:
        request, sampling = seq.request, seq.request.sampling
        if not sampling.grammar:
            return True
        live = self._live.get(sampling.grammar)
        if live is None:
            num_bytes = sampling.grammar_bytes + BYTES_IN_USE
            has_room = len(self._live) < self._max_live and self._num_bytes + num_bytes <= MAX_BYTES
            must_wait = self._must_wait(sampling.grammar)
            if (self._live and not has_room) or must_wait:
                self._hold(request, GRAMMAR, for_trial=must_wait)
                return False
            live = self._add(sampling.grammar, num_bytes)
            if self.trials.is_suspected(sampling.grammar):
                self.trials.begin(sampling.grammar, self.messages.pop())
        live.users[request] = None
        request.grammar_id = live.grammar_id
        if not live.is_ready:
            self._waiting.hold(request, GRAMMAR)
        return live.is_ready

    def makes_for(self, request: Request) -> tuple[str, ...]:
        grammar = request.sampling.grammar
        return (grammar,) if grammar else ()

    def answered(self, message: GrammarPrepared) -> list[Ending]:
        """Queue the requests held for a grammar that is now ready; those end for which it cannot be used."""
        live = self._ids.get(message.grammar_id)
        self._unanswered.discard(message.grammar_id)
        if live is None or live.is_ready:
            self._ask_again()
            return []  # no request needs it any more
        live.is_ready = not message.error
        self.trials.settled(live.text)
        self._ask_again()
        if message.error:
            return [Ending(request, message.error, "grammar") for request in live.users]
        for request in reversed(live.users):  # each goes to the head of its line
            self._waiting.release(request)
        return []

    def leave(self, request: Request) -> None:
        if not request.sampling.grammar:
            return
        live = self._ids.get(request.grammar_id)
        request.grammar_id = 0
        if live is not None:
            del live.users[request]
            if live.users:
                return
            del self._live[live.text], self._ids[live.grammar_id]
            self._num_bytes -= live.num_bytes
            self.messages.append(DropGrammar(live.grammar_id))
            if self.trials.num_untold and self.trials.current == live.text:
                self._unanswered.discard(live.grammar_id)
            self.trials.abandoned(live.text)
            self._ask_again()
        # Do this even if it had no live grammar: it may have been next to use the room of a request that left before.
        while self._no_room and len(self._live) < self._max_live:
            if self._waiting.release(self._no_room.popleft()):
                return  # it asks again at the head of the queue

    def let_go(self, request: Request) -> None:
        if request.grammar_id:
            self.leave(request)

    def reset(self, limits: WorkerLimits, *, has_died: bool) -> list[Ending]:
        """Forget the old worker's grammars: each is requested again when its requests' turn comes.

        Args:
            limits: of the new worker.
            has_died: whether the old one died, for whatever reason.

        Returns:
            The requests that need the grammar that killed it.
        """
        self._max_live = limits.max_num_seqs
        culprits: list[Request] = []
        unready = [live.text for live in self._live.values() if not live.is_ready]
        if has_died and (guilty := self.trials.blame(unready)) is not None:
            culprits = list(self._live[guilty].users)
        for live in self._live.values():
            for request in live.users:
                request.grammar_id = 0
        self._live.clear()
        self._ids.clear()
        self._num_bytes = 0
        self._forget_worker()
        return [Ending(request, ENDS_WORKERS, "ends_workers") for request in culprits]

    def _add(self, text: str, num_bytes: int) -> _Live:
        live = _Live(self._ask(), text, num_bytes)
        self._live[text] = self._ids[live.grammar_id] = live
        self._num_bytes += num_bytes
        self.messages.append(PrepareGrammar(live.grammar_id, text, live.num_bytes))
        return live


PARTS = (GrammarGate,)
