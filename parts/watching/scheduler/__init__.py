"""The engine's side of the live view: what its watchers get."""

from collections.abc import Collection
from collections.abc import Sequence as ListOf
from time import monotonic
from typing import TYPE_CHECKING, Self

from penstock.core.engine.part import EnginePart, Steering
from penstock.core.scheduling.scheduler import ScheduledStep
from penstock.core.sequences.intake import Refusal
from penstock.ipc.channel import PeerId
from penstock.ipc.messages import AddRequest, SequenceDelta, StepResult, TokenBatch
from penstock.parts.watching.messages import ListPages, ListPrefixes, Question, ShowLife, WatchSteps
from penstock.parts.watching.scheduler.feed import Feed
from penstock.parts.watching.scheduler.watchers import Watchers

if TYPE_CHECKING:
    from penstock.core.engine.loop import Engine


class Watching(EnginePart):
    """Passes what happens to the feed while frontends watch."""

    orders = (WatchSteps, ListPages, ListPrefixes, ShowLife)

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.feed: Feed | None = None
        self._watchers: Watchers | None = None  # until a frontend asks for something

    @classmethod
    def of(cls, engine: "Engine") -> Self:
        return cls(engine)

    def order(self, peer: PeerId, message: WatchSteps | Question) -> None:
        if self._watchers is None:
            self._watchers = Watchers(self._engine.frontends.channel, lambda: self._engine.scheduler, self._show_to)
        if isinstance(message, WatchSteps):
            self._watchers.watch(peer, message)
        else:
            self._watchers.ask(peer, message)

    def _show_to(self, feed: Feed | None) -> None:
        self.feed = feed

    def on_frontend_gone(self, peer: PeerId) -> None:
        scheduler = self._engine.scheduler
        if self.feed is not None and scheduler is not None:
            self.feed.on_owner_gone(peer, scheduler, monotonic())
        if self._watchers is not None:
            self._watchers.remove(peer)

    def on_request(self, request: AddRequest, refusal: Refusal | None) -> None:
        if self.feed is not None:
            self.feed.on_request(request, monotonic())

    def on_steer(self, order: Steering) -> None:
        if self.feed is not None and self._engine.scheduler is not None:
            self.feed.on_steer(order, self._engine.scheduler.requests[order.request_id], monotonic())

    def on_deltas(self, deltas: ListOf[SequenceDelta]) -> None:
        if self.feed is not None:
            self.feed.on_deltas(deltas, self._engine.scheduler, monotonic())

    def planned(self, step: ScheduledStep, started: float) -> None:
        if self.feed is not None and self._engine.scheduler is not None:
            self.feed.planned(step, self._engine.scheduler, started, monotonic())

    def returned(self, result: StepResult, told: Collection[TokenBatch], received: float) -> None:
        if self.feed is not None and self._engine.scheduler is not None:
            self.feed.returned(result, told, self._engine.scheduler, received)

    def on_workers_lost(self) -> None:
        if self.feed is not None:
            self.feed.forget_planned(monotonic())

    def close(self) -> None:
        if self._watchers is not None:
            self._watchers.close()


PARTS = (Watching,)
