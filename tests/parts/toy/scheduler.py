"""In the scheduler's process: it tells workers of requests that leave, and frontends of what workers count."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from penstock.core.engine.part import EnginePart
from penstock.core.scheduling.answers import FromAll
from penstock.core.scheduling.part import SchedulerPart
from penstock.core.sequences.sequence import Request
from penstock.ipc.messages import Message, WorkerHello
from tests.parts.toy.messages import ToyCounted, ToyLeft, ToyTold

if TYPE_CHECKING:
    from penstock.core.engine.loop import Engine
    from penstock.core.scheduling.scheduler import Scheduler


class Leaving(SchedulerPart):
    """Notes who leaves."""

    __slots__ = ("_num_left",)

    def __init__(self) -> None:
        self._num_left = 0

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self:
        return before or cls()

    def leave(self, request: Request) -> None:
        self._num_left += 1

    def take_behind_plan(self) -> Sequence[Message]:
        if not self._num_left:
            return ()
        told, self._num_left = ToyLeft(self._num_left), 0
        return (told,)


class Telling(EnginePart):
    """Passes on what workers have counted."""

    answers = ((ToyCounted, lambda: FromAll(lambda _: "all", ends_at_error=False)),)

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    @classmethod
    def of(cls, engine: "Engine") -> Self:
        return cls(engine)

    def answered(self, rank: WorkerHello, message: ToyCounted) -> None:
        self._engine.frontends.tell_all(ToyTold(message.num_requests))


PARTS = (Leaving, Telling)
