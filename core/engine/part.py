"""What the scheduler's process does beside moving requests and plans. `config/parts.py` finds who there is.

A part overrides the methods that it needs, and only those are ever called: the engine asks once, at the start, who
overrides what. So a part that is not there costs nothing. What decides about requests is a `SchedulerPart` instead.
"""

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from penstock.config.parts import brought
from penstock.core.scheduling.answers import Heard
from penstock.core.scheduling.scheduler import ScheduledStep
from penstock.core.sequences.intake import Refusal
from penstock.ipc.channel import PeerId
from penstock.ipc.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    FrontendHello,
    Message,
    PauseRequest,
    ResumeRequest,
    SequenceDelta,
    StepResult,
    TokenBatch,
    WorkerHello,
)
from penstock.ipc.overrides import calls, overriding

if TYPE_CHECKING:
    from penstock.core.engine.loop import Engine

_Part = TypeVar("_Part", bound="EnginePart")

Steering = AbortRequest | PauseRequest | ResumeRequest


class EnginePart:
    """Lives in the engine's event loop until `close`. Times are monotonic seconds."""

    orders: ClassVar[tuple[type[Message], ...]] = ()
    """The frontends' messages that are this part's."""

    answers: ClassVar[Heard] = ()
    """The workers' messages that are this part's, and how those of several ranks become one."""

    @classmethod
    def of(cls, engine: "Engine") -> Self | None:
        """Return the part for an engine that starts, or None if it needs none; there are no workers yet."""
        raise NotImplementedError

    # --- frontends --------------------------------------------------------------------------

    def order(self, peer: PeerId, message: Any) -> None:
        """A frontend has sent one of `orders`."""
        raise NotImplementedError

    def on_frontend(self, peer: PeerId, hello: FrontendHello) -> None:
        """A frontend has said hello."""

    def on_frontend_gone(self, peer: PeerId) -> None:
        """A frontend is gone; its requests are about to be aborted."""

    def facts(self, ready: EngineReady) -> EngineReady:
        """Add what frontends must know of this part."""
        return ready

    def stats(self) -> Mapping[str, Any]:
        """Fields of `EngineStats` and their values."""
        return {}

    # --- workers ----------------------------------------------------------------------------

    def answered(self, rank: WorkerHello, message: Any) -> None:
        """Workers have sent one of `answers`; `rank`: the one that sent it last."""
        raise NotImplementedError

    def on_workers(self, hello: WorkerHello) -> None:
        """All workers are there, with empty rows and pages."""

    def on_workers_lost(self) -> None:
        """The workers are gone, and the results of their steps will not come; the scheduler does not know yet."""

    def on_new_pages(self) -> None:
        """The scheduler is there, or has forgotten its old workers: its pages are new."""

    # --- requests and steps -----------------------------------------------------------------

    def on_request(self, request: AddRequest, refusal: Refusal | None) -> None:
        """A request has come, and was accepted or refused."""

    def on_steer(self, order: Steering) -> None:
        """A live request is about to be steered by its frontend."""

    def on_late(self, order: Steering, peer: PeerId) -> None:
        """A frontend steers a request that has ended, or never was here."""

    def on_deltas(self, deltas: ListOf[SequenceDelta]) -> None:
        """Deltas are sent to a frontend other than with a step's tokens."""

    def on_made(self, message: Message) -> None:
        """Workers have answered a part of the scheduler, which does not know yet."""

    def on_cache_reset(self) -> None:
        """The prefix cache is about to be dropped."""

    def planned(self, step: ScheduledStep, started: float) -> None:
        """A step was planned since `started`, and is sent now."""

    def returned(self, result: StepResult, told: Collection[TokenBatch], received: float) -> None:
        """A step's result, which came at `received`, was applied; `told` is sent to the frontends."""

    @property
    def wants_records(self) -> bool:
        """Whether steps must be planned with records."""
        return False

    # --- the engine -------------------------------------------------------------------------

    def send(self) -> None:
        """Send what the scheduler has for others than frontends and workers."""

    def changed(self) -> None:
        """Requests, pages or counters may have changed."""

    def beat(self, now: float) -> None:
        """Called every `heartbeat_interval`."""

    @property
    def is_idle(self) -> bool:
        """Whether the process may end without loss to others."""
        return True

    def close(self) -> None:
        """The engine ends."""


class EngineParts:
    """The parts that an engine has, and who of them overrides what."""

    def __init__(self, engine: "Engine") -> None:
        found = (kind.of(engine) for kind in brought("scheduler", EnginePart))
        self.all = tuple(part for part in found if part is not None)
        self.order: dict[type[Message], Callable[[PeerId, Any], None]] = {
            kind: part.order for part in self.all for kind in part.orders
        }
        self.answered: dict[type[Message], Callable[[WorkerHello, Any], None]] = {
            kind: part.answered for part in self.all for kind, _ in part.answers
        }
        self.on_frontend = self._calls("on_frontend")
        self.on_frontend_gone = self._calls("on_frontend_gone")
        self._facts: list[Callable[[EngineReady], EngineReady]] = self._calls("facts")
        self._stats: list[Callable[[], Mapping[str, Any]]] = self._calls("stats")
        self.on_workers = self._calls("on_workers")
        self.on_workers_lost = self._calls("on_workers_lost")
        self.on_new_pages = self._calls("on_new_pages")
        self.on_request = self._calls("on_request")
        self.on_steer = self._calls("on_steer")
        self.on_late = self._calls("on_late")
        self.on_deltas = self._calls("on_deltas")
        self.on_made = self._calls("on_made")
        self.on_cache_reset = self._calls("on_cache_reset")
        self.planned = self._calls("planned")
        self.returned = self._calls("returned")
        self._recording = overriding(EnginePart, self.all, "wants_records")
        self.send = self._calls("send")
        self.changed = self._calls("changed")
        self.beat = self._calls("beat")
        self.close = self._calls("close")

    def get(self, kind: type[_Part]) -> _Part | None:
        """The part of this class, if there is one."""
        return next((part for part in self.all if isinstance(part, kind)), None)

    def _calls(self, name: str) -> list[Callable[..., Any]]:
        return calls(EnginePart, self.all, name)

    @property
    def want_records(self) -> bool:
        """Whether steps must be planned with records."""
        return any(part.wants_records for part in self._recording)

    @property
    def are_idle(self) -> bool:
        """Whether the process may end without loss to others."""
        return all(part.is_idle for part in self.all)

    def facts(self, ready: EngineReady) -> EngineReady:
        """What frontends must know of the engine, with what they must know of its parts."""
        for facts in self._facts:
            ready = facts(ready)
        return ready

    def stats(self) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        return {field: value for stats in self._stats for field, value in stats().items()}
