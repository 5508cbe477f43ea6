"""Lets a waiting request enter a row only once its adapter is in the worker's memory.

    LoadAdapter ──▶ known; asked for as soon as there is room         AdapterNews ──▶ frontends
    head of the queue ── admits? ──▶ in memory: it enters
                             │ not: the least recently used adapter that no request needs makes room;
                             ▼      if there is none, the request is held until there is
    PrepareAdapter ──▶ worker, beside its steps ──▶ AdapterPrepared: held requests are queued again

The worker has room for a number of adapters; hundreds may be known, and are read again when their turn comes. Those of
requests stay, but for three reasons:

    others have passed      requests that find their adapter in memory pass those that wait for room; after some, one
                            adapter takes no further requests, so that it makes room when those that it has end
    who waits goes before   requests without a row, on a greater level, let go of their adapter; they ask again
    who runs gives way      such as work in the background: it loses its rows, several times a second at most

Pure bookkeeping, like the scheduler that owns it.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Self

from penstock.config import Config
from penstock.core.engine.part import EnginePart
from penstock.core.kv.kv_pages import Start
from penstock.core.scheduling.answers import FromAll
from penstock.core.scheduling.part import Ending
from penstock.core.scheduling.room_gate import RoomGate
from penstock.core.scheduling.step_record import ADAPTER
from penstock.core.scheduling.trials import ENDS_WORKERS
from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.limits import WorkerLimits
from penstock.core.sequences.sequence import Request, Sequence
from penstock.ipc.channel import PeerId
from penstock.ipc.messages import FrontendHello
from penstock.parts.adapters.keys import key_of
from penstock.parts.adapters.messages import (
    AdapterNews,
    AdapterPrepared,
    AdapterStage,
    AdapterState,
    DropAdapter,
    ForgetAdapter,
    LoadAdapter,
    PrepareAdapter,
    UnloadAdapter,
)
from penstock.parts.adapters.options import AdapterOptions

if TYPE_CHECKING:
    from penstock.core.engine.loop import Engine
    from penstock.core.scheduling.scheduler import Scheduler

_UNKNOWN = "this engine does not have the request's adapter"
_UNLOADED = "the request's adapter was unloaded"
_KILLS = "the worker died whenever it read this adapter"

MOST_PASSING = 32
"""Requests that may pass one that waits for room."""


def _of_all_ranks(answers: Collection[AdapterPrepared]) -> AdapterPrepared:
    """No rank refuses it; a stage of a pipeline may have none of its modules."""
    return max(answers, key=attrgetter("rank"))


class Known:
    """An adapter that frontends have named."""

    __slots__ = ("error", "is_kept", "is_leaving", "path", "rank", "state")

    def __init__(self, path: str, *, is_leaving: bool) -> None:
        self.path = path
        self.is_leaving = is_leaving  # it goes with the last request that has it
        self.is_kept = is_leaving  # its requests, which began elsewhere, are still to come
        self.state: AdapterStage = "leaving" if is_leaving else "loading"
        self.error = ""
        self.rank = 0


class _Live:
    """An adapter that the worker has, or is reading."""

    __slots__ = ("adapter_id", "is_ready", "key", "users")

    def __init__(self, adapter_id: int, key: str) -> None:
        self.adapter_id = adapter_id
        self.key = key
        self.users: dict[Request, None] = {}
        self.is_ready = False


class AdapterGate(RoomGate):
    """The adapters of one scheduler. Requests that are paused or have ended must `leave`."""

    __slots__ = (
        "_aborted",
        "_closing",
        "_first",
        "_ids",
        "_live",
        "_max_live",
        "_num_passed",
        "_scheduler",
        "_untried",
        "has_news",
        "known",
        "may_forget",
    )

    answers = ((AdapterPrepared, lambda: FromAll(attrgetter("adapter_id"), _of_all_ranks)),)
    orders = (LoadAdapter, UnloadAdapter)

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self:
        return cls(scheduler) if before is None else before

    @classmethod
    def check_options(cls, config: Config) -> None:
        for name, path in config.of(AdapterOptions).adapters.items():
            key_of(name, path)

    @staticmethod
    def missed(request: Request) -> Refusal | None:
        return Refusal("no_adapter", _UNKNOWN) if request.adapter else None

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler.waiting, scheduler.trials)
        self._scheduler = scheduler
        self._max_live = scheduler.config.of(AdapterOptions).max_loras
        self.known: dict[str, Known] = {}  # by key
        self.has_news = False
        self.may_forget = False
        """Whether an adapter leaves, and perhaps has no request any more: then `forget` is to be called."""
        self._aborted: list[Request] = []  # those that end with their adapter, which was unloaded at once
        self._closing = ""  # the one in memory that takes no further requests, because others wait for room
        self._first: Request | None = None  # whose turn it was last of those held for room; it is one of them
        self._num_passed = 0  # requests that found their adapter in memory while others waited for room
        self._untried: dict[str, None] = {}  # those that the worker was never asked for
        self._live: dict[str, _Live] = {}  # by key, the least recently used first
        self._ids: dict[int, _Live] = {}

    # --- what is known ----------------------------------------------------------------------

    def load(self, message: LoadAdapter) -> None:
        """A frontend names an adapter."""
        known = self.known.get(message.key)
        if known is None or (known.state == "failed" and not message.is_leaving):
            self.known[message.key] = Known(message.path, is_leaving=message.is_leaving)
            self._untried[message.key] = None
            self._try()
            self.has_news = True
            return
        known.path = message.path  # the same files, perhaps in another place
        if known.is_leaving and not message.is_leaving:
            known.is_leaving = known.is_kept = False
            known.state, known.error = ("ready" if known.rank else "loading"), ""
            if not known.rank and message.key not in self._live:  # it was never read
                self._untried[message.key] = None
                self._try()
        self.has_news = True

    def unload(self, key: str, *, abort: bool = False) -> None:
        """Let an adapter go with its last request, or with `abort` end those that it has."""
        if (known := self.known.get(key)) is not None:
            known.is_leaving, known.is_kept, known.state = True, False, "leaving"
            self.has_news = self.may_forget = True
            self._untried.pop(key, None)
            if abort:
                requests = [each for each in self._scheduler.requests.values() if each.adapter == key]
                for request in requests:
                    self._scheduler.pause(request.request_id)
                self._aborted += requests

    def forget(self, used: set[str]) -> None:
        """Forget what leaves, and is not the adapter of any request."""
        self.may_forget = False
        leaving = [key for key, known in self.known.items() if known.is_leaving and not known.is_kept]
        gone = [key for key in leaving if key not in used]
        for key in gone:
            del self.known[key]
            self._untried.pop(key, None)
            if (live := self._live.get(key)) is not None:
                self._drop(live)
            self.messages.append(ForgetAdapter(key))
            self.has_news = True
        if gone:
            self._use_room()

    def news(self, requests: Iterable[Request]) -> AdapterNews:
        """All adapters; `requests` are counted."""
        self.has_news = False
        running, waiting = Counter[str](), Counter[str]()
        for request in requests:
            if request.adapter:
                running[request.adapter] += len(request.running)
                waiting[request.adapter] += len(request.waiting)
        return AdapterNews(
            tuple(
                AdapterState(key, its.path, its.state, its.error, its.rank, running[key], waiting[key])
                for key, its in self.known.items()
            )
        )

    def order(self, message: LoadAdapter | UnloadAdapter) -> None:
        if isinstance(message, LoadAdapter):
            self.load(message)
        else:  # only of one that could not be loaded: a program has no other way to unload
            self.unload(message.key)
            self.forget({request.adapter for request in self._scheduler.requests.values()})

    def take_news(self) -> tuple[AdapterNews, ...]:
        return (self.news(()),) if self.has_news else ()

    # --- what the worker has ----------------------------------------------------------------

    def accepts(self, request: Request) -> Refusal | None:
        if not request.adapter:
            return None
        known = self.known.get(request.adapter)
        if known is None:
            return Refusal("no_adapter", _UNKNOWN)
        return Refusal("no_adapter", known.error) if known.state == "failed" else None

    def admits(self, seq: Sequence, start: Start) -> bool:
        request = seq.request
        if not request.adapter:
            return True
        live = self._live.get(request.adapter)
        if live is None:
            must_wait = self._must_wait(request.adapter)
            if must_wait or not self._make_room(request):
                self._hold(request, ADAPTER, for_trial=must_wait)
                return False
            live = self._add(request.adapter)
            if self.trials.is_suspected(request.adapter):
                self.trials.begin(request.adapter, self.messages.pop())
        elif (self._no_room or self._untried) and request not in live.users and not self._may_pass(request):
            self._hold(request, ADAPTER, for_trial=False)
            return False
        self._live[request.adapter] = self._live.pop(request.adapter)  # the most recently used one
        live.users[request] = None
        request.adapter_id = live.adapter_id
        if not live.is_ready:
            self._waiting.hold(request, ADAPTER)
        return live.is_ready

    def makes_for(self, request: Request) -> tuple[str, ...]:
        return (request.adapter,) if request.adapter else ()

    def answered(self, message: AdapterPrepared) -> list[Ending]:
        """Queue the requests held for an adapter that is now ready; those end for which it cannot be used."""
        live = self._ids.get(message.adapter_id)
        self._unanswered.discard(message.adapter_id)
        if live is None or live.is_ready:
            self._ask_again()
            self._use_room()
            return []  # it was dropped meanwhile
        self.has_news = True
        known = self.known.get(live.key)
        if known is not None:
            known.rank, known.error = message.rank, message.error
            known.state = "failed" if message.error else "leaving" if known.is_leaving else "ready"
        self.trials.settled(live.key)
        users = list(live.users)
        if message.error:
            self._drop(live)
            for request in users:
                request.adapter_id = 0
        else:
            live.is_ready = True
            for request in reversed(users):  # each goes to the head of its line
                self._waiting.release(request)
        self._ask_again()
        self._use_room()
        return [Ending(request, message.error, "no_adapter") for request in users] if message.error else []

    def leave(self, request: Request) -> None:
        if not request.adapter:
            return
        live = self._ids.get(request.adapter_id)
        request.adapter_id = 0
        if live is not None:
            del live.users[request]
        known = self.known.get(request.adapter)
        self.may_forget |= known is not None and known.is_leaving
        self._use_room()

    def let_go(self, request: Request) -> None:
        if request.adapter_id:
            self.leave(request)

    def expire(self) -> list[Ending]:
        """End the requests of adapters that are unloaded at once; let running ones give way to one that waits."""
        ending: list[Ending] = []
        if self._aborted:
            for request in self._aborted:
                self._scheduler.pause(request.request_id)  # out of its rows: only what waits can end with an error
                ending.append(Ending(request, _UNLOADED, "no_adapter"))
            self._aborted.clear()
        if self._no_room and (first := self._first_held()) is not None:
            self._give_way(first)
            self._use_room()  # rows may have been lost since, for other reasons
        return ending

    def reset(self, limits: WorkerLimits, *, has_died: bool) -> list[Ending]:
        """Forget what the old worker had: each adapter is read again when its requests' turn comes."""
        culprits: list[Request] = []
        unready = [live.key for live in self._ids.values() if not live.is_ready]  # in the order in which they are read
        if has_died and (guilty := self.trials.blame(unready)) is not None:
            culprits = list(self._live[guilty].users)
            if (known := self.known.get(guilty)) is not None:
                known.state, known.error = "failed", _KILLS
                self.has_news = True
        for live in self._live.values():
            for request in live.users:
                request.adapter_id = 0
        self._live.clear()
        self._ids.clear()
        self._closing, self._num_passed, self._first = "", 0, None
        self._forget_worker()
        self._untried |= {key: None for key, known in self.known.items() if known.state == "loading"}
        return [Ending(request, ENDS_WORKERS, "ends_workers") for request in culprits]

    def _try(self) -> None:
        """Have new adapters read and checked, as far as there is room without a request's giving way."""
        while self._untried and self.trials.current is None and self._make_room():
            key = next(iter(self._untried))
            if key in self._live:
                del self._untried[key]
            elif not self.trials.is_suspected(key):
                self._add(key)
            elif self.num_in_making:
                return  # it is tried alone, once that is made
            else:
                self._add(key)
                self.trials.begin(key, self.messages.pop())

    def _use_room(self) -> None:
        """There may be room: whoever was held for it asks again, then new adapters are read."""
        if self._no_room:
            held = [request for request in self._no_room if self._is_held(request)]
            if not self._untried and all(request.adapter in self._live for request in held):
                self._closing, self._num_passed = "", 0  # nobody waits for room any more
            here = [request for request in held if request.adapter in self._live and request.adapter != self._closing]
            left = set(here)
            self._no_room = deque(request for request in held if request not in left)
            for request in reversed(here):  # each goes to the head of its line
                self._waiting.release(request)
        if (first := self._first_held()) is not None and self._has_room(first):
            self._no_room.remove(first)
            self._first = None
            self._waiting.release(first)
            return  # it asks again at the head of the queue
        if self._untried:
            self._try()

    def _first_held(self) -> Request | None:
        """Whose turn it is of those that are held for room."""
        if self._first is None or not self._lacks_room(self._first):
            self._first = min(filter(self._lacks_room, self._no_room), key=_level, default=None)
        return self._first

    def _lacks_room(self, request: Request) -> bool:
        return request.adapter not in self._live and self._is_held(request)

    def _is_held(self, request: Request) -> bool:
        """Whether it is still held here, and not by another part since."""
        return self._waiting.held().get(request) == ADAPTER

    def _hold(self, request: Request, why: str, *, for_trial: bool) -> None:
        super()._hold(request, why, for_trial=for_trial)
        if self._first is not None and request.level < self._first.level and self._lacks_room(request):
            self._first = request

    def _ask_again(self) -> None:
        super()._ask_again()
        self._first = None

    def _may_pass(self, request: Request) -> bool:
        """Whether a request whose adapter is in memory enters before those that wait for room."""
        first = self._first_held()
        if first is None and not self._untried:
            return True
        if request.adapter == self._closing or (first is not None and _goes_before(first, request)):
            return False
        self._num_passed += 1
        if self._num_passed > MOST_PASSING and not self._closing:
            self._closing = next(iter(self._live))
        return request.adapter != self._closing

    def _give_way(self, first: Request) -> None:
        """Take the rows of an adapter's requests if all of them give way to the first one that waits for room."""
        for live in [*self._live.values()]:
            if live.is_ready and all(_lets_go(user, first) or self._yields(user, first) for user in live.users):
                for request in [user for user in live.users if user.running]:
                    self._scheduler.pause(request.request_id)
                    self._scheduler.resume(request.request_id)  # behind those that wait already
                return

    def _yields(self, user: Request, first: Request) -> bool:
        policy = self._scheduler.policy
        takes_rows = policy.preempts and not first.is_overdue
        return bool(user.running) and (
            _gives_way(user, first)
            or (takes_rows and all(policy.yields(seq, first.waiting[0]) for seq in user.running))
        )

    def _trial_ended(self) -> None:
        super()._trial_ended()
        self._try()

    def _make_room(self, request: Request | None = None) -> bool:
        """Whether there is room for one more; the least recently used one that nobody needs makes some.

        `request`: who wants it; those of greater levels that have no row need theirs less.
        """
        if len(self._live) < self._max_live:
            return True
        idle = self._idle(request)
        if idle is not None:
            for user in idle.users:
                user.adapter_id = 0  # it asks again
            self._drop(idle)
        return idle is not None

    def _has_room(self, request: Request) -> bool:
        return len(self._live) < self._max_live or self._idle(request) is not None

    def _idle(self, request: Request | None = None) -> _Live | None:
        ready = [live for live in self._live.values() if live.is_ready]
        ready.sort(key=lambda live: live.key != self._closing)  # it goes first; the others keep their order
        unused = next((live for live in ready if not live.users), None)
        if unused is not None or request is None:
            return unused
        return next((live for live in ready if all(_lets_go(user, request) for user in live.users)), None)

    def _add(self, key: str) -> _Live:
        live = _Live(self._ask(), key)
        self._live[key] = self._ids[live.adapter_id] = live
        self._untried.pop(key, None)
        self.messages.append(PrepareAdapter(live.adapter_id, self.known[key].path, key))
        return live

    def _drop(self, live: _Live) -> None:
        del self._live[live.key], self._ids[live.adapter_id]
        if live.key == self._closing:
            self._closing, self._num_passed = "", 0
        if self.trials.num_untold and self.trials.current == live.key:  # the worker was not asked for it
            self._unanswered.discard(live.adapter_id)
        else:
            self.messages.append(DropAdapter(live.adapter_id))
        self.trials.abandoned(live.key)


_level = attrgetter("level")


def _gives_way(request: Request, first: Request) -> bool:
    return bool(request.gives_way) and not first.gives_way


def _goes_before(first: Request, request: Request) -> bool:
    """Whether one that waits for room goes before another one, whose adapter is in memory."""
    return _gives_way(request, first) or first.level < request.level


def _lets_go(user: Request, request: Request) -> bool:
    """Whether a request that has an adapter lets go of it for another one, which waits for room."""
    return not user.running and _goes_before(request, user)


class AdapterNewsTeller(EnginePart):
    """Takes what frontends ask, and tells them of all adapters when something of them has changed."""

    orders = (LoadAdapter, UnloadAdapter)

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        named = engine.config.of(AdapterOptions).adapters
        self._early = [LoadAdapter(key_of(name, path), path) for name, path in named.items()]
        """What is to be loaded once there is a scheduler; at first the adapters of `--lora`."""

    @classmethod
    def of(cls, engine: "Engine") -> Self:
        return cls(engine)

    @property
    def _gate(self) -> AdapterGate | None:
        scheduler = self._engine.scheduler
        return None if scheduler is None else scheduler.parts.get(AdapterGate)

    def order(self, peer: PeerId, message: LoadAdapter | UnloadAdapter) -> None:
        gate = self._gate
        if isinstance(message, LoadAdapter):
            if gate is None:
                self._early.append(message)
            else:
                gate.load(message)
        elif gate is None:
            self._early = [early for early in self._early if early.key != message.key]
        else:
            gate.unload(message.key, abort=message.abort)
        self._engine.changed()

    def on_frontend(self, peer: PeerId, hello: FrontendHello) -> None:
        if (gate := self._gate) is not None:
            self._engine.frontends.tell(peer, gate.news(self._requests()))

    def on_new_pages(self) -> None:
        gate = self._gate
        assert gate is not None
        early, self._early = self._early, []
        for message in early:
            gate.load(message)
        self.changed()

    def changed(self) -> None:
        gate = self._gate
        if gate is None:
            return
        if gate.may_forget:
            gate.forget({request.adapter for request in self._requests()})
        if gate.has_news:
            self._engine.frontends.tell_all(gate.news(self._requests()))

    def _requests(self) -> Iterator[Request]:
        scheduler = self._engine.scheduler
        return iter(()) if scheduler is None else iter(scheduler.requests.values())


PARTS = (AdapterGate, AdapterNewsTeller)
