"""Both sides of handovers (disaggregated prefill), as the scheduler uses them. One engine may be both at once."""

from collections.abc import Collection
from collections.abc import Sequence as ListOf
from operator import attrgetter
from typing import TYPE_CHECKING, Self

import structlog
from msgspec.structs import replace

from penstock.core.kv.holder import PageTables
from penstock.core.kv.kv_pages import KVPages, Start
from penstock.core.scheduling.answers import FromAll
from penstock.core.scheduling.part import Ending, SchedulerPart
from penstock.core.scheduling.step_record import PREFILL
from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.limits import WorkerLimits
from penstock.core.sequences.sequence import Owner, Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.plan_builder import Chunk
from penstock.ipc.messages import HandoverStats, Message
from penstock.parts.handover.messages import KVReceived
from penstock.parts.handover.scheduler.arrivals import Arrivals, HandoverTotals, Namespace, Order, Peers
from penstock.parts.handover.scheduler.departures import LOST, Departures

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler

log = structlog.get_logger()

__all__ = ["Handovers", "Peers"]


def _together(answers: Collection[KVReceived]) -> KVReceived:
    """Combine the ranks' answers into one for the group."""
    failed = dict.fromkeys(name for each in answers for name in each.failed_transports)
    error = next((each.error for each in answers if each.error), "")
    num_bytes = sum(each.num_bytes for each in answers)
    return replace(next(iter(answers)), num_bytes=num_bytes, error=error, failed_transports=tuple(failed))


class Handovers(SchedulerPart):
    """The pages that one worker's pool gets from other engines, and those that it has for them."""

    stats_field, holds_for = "handover", PREFILL
    answers = ((KVReceived, lambda: FromAll(attrgetter("handover_id"), _together, ends_at_error=False)),)
    __slots__ = ("_lost", "_totals", "arrivals", "departures")

    def __init__(
        self,
        kv: KVPages,
        waiting: WaitingQueue,
        namespace: Namespace,
        least: int,
        before: "Handovers | None" = None,
    ) -> None:
        """Arguments as in `Arrivals`; `before`: the handovers of the worker that is gone."""
        self._totals: HandoverTotals = HandoverTotals() if before is None else before._totals
        self.arrivals = Arrivals(kv, waiting, self._totals, namespace, least)
        self.departures = Departures(kv, self._totals)
        self._lost: list[Request] = []  # whose pages were lost with the worker before
        if before is not None:
            self._lost = before.departures.unfinished()
            before.arrivals.abandon()
            self.arrivals.orders, self.arrivals.peers = before.arrivals.orders, before.arrivals.peers

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self | None:
        limits = scheduler.limits
        if not limits.hands_over:
            return None
        found = cls(scheduler.kv, scheduler.waiting, limits.namespace, scheduler.options.min_prefill_tokens, before)
        found.arrivals.room_for = scheduler.room_for
        return found

    @staticmethod
    def missed(request: Request) -> Refusal | None:
        if request.handover_from >= 0:
            return Refusal("internal", "this engine was started without --role: it hands no pages over")
        return None

    def accepts(self, request: Request) -> Refusal | None:
        if request.handover_from >= 0 and request.images:
            return Refusal("internal", "the request has images; no other engine reads their pages")
        return None

    def arrived(self, request: Request) -> None:
        if request.handover_from >= 0:
            self.departures.begin(request, request.handover_from)

    def answered(self, message: KVReceived) -> tuple[Ending, ...]:
        """Pages from another engine are there, or are no longer written to."""
        if error := self.arrivals.received(message):
            log.warning("handover failed, prefilling locally", handover_id=message.handover_id, reason=error)
        return ()

    def take_before_plan(self) -> ListOf[Message]:
        """Offers come before the plan that completes their pages."""
        return self.departures.take_messages()

    def take_behind_plan(self) -> ListOf[Message]:
        """Pages are filled behind the copies of a plan."""
        return self.arrivals.take_messages()

    def admits(self, seq: Sequence, start: Start) -> bool:
        return self.arrivals.admits(seq, start)

    def entered(self, seq: Sequence, num_cached: int) -> int:
        return self.arrivals.entered(seq, num_cached)

    def advance(self, *, is_idle: bool) -> list[Ending]:
        """Do what is due before the next plan. Returns the other engines' requests that must end."""
        self.arrivals.expire()
        return [Ending(request, LOST, "internal") for request in self.departures.take_broken()]

    def reset(self, limits: WorkerLimits, *, has_died: bool) -> list[Ending]:
        lost, self._lost = self._lost, []
        return [Ending(request, LOST, "internal") for request in lost]

    @property
    def wakes_at(self) -> float:
        return self.arrivals.wakes_at

    @property
    def awaits_plan(self) -> bool:
        return self.arrivals.awaits_plan

    def why(self, request: Request) -> str:
        return self.arrivals.awaited(request)

    def make_way(self, *, is_idle: bool) -> bool:
        """The next request lacks pages. Returns whether it may have more now. `is_idle`: nothing runs.

        Pages that arrived since it began to wait count too: if nothing runs, nothing else would end its wait.
        """
        if self.arrivals.unpin():
            return True
        if is_idle and self.departures.unfinished():  # two engines whose roles change could wait for each other
            self.arrivals.give_up_one()
        return False

    def planned(self, chunks: ListOf[Chunk], step_id: int) -> None:
        """Offer the pages that these chunks complete."""
        self.departures.offer(chunks, step_id)

    def keeps_pages(self, seq: Sequence) -> bool:
        return self.departures.keeps(seq)

    def leave(self, request: Request) -> None:
        """A request has ended, or is paused."""
        self.arrivals.leave(request)
        self.departures.ended(request)

    def leave_owner(self, owner: Owner) -> None:
        """An engine, or a frontend, is gone."""
        self.departures.leave_owner(owner)

    def take_orders(self) -> list[Order]:
        """Return the messages for prefill engines."""
        orders, self.arrivals.orders = self.arrivals.orders, []
        return orders

    def holders(self) -> ListOf[PageTables]:
        return [*self.arrivals.holders(), *self.departures.holders()]

    def stats(self) -> HandoverStats:
        """Return the counters as they are sent to the frontends."""
        totals = self._totals
        return HandoverStats(
            num_waiting=self.arrivals.num_waiting,
            num_kept_pages=self.departures.num_kept_pages,
            num_received_pages=totals.num_received_pages,
            num_received_bytes=totals.num_received_bytes,
            num_sent_pages=totals.num_sent_pages,
            num_received=totals.num_received,
            num_sent=totals.num_sent,
            num_failed=totals.num_failed,
            failed_transports=totals.failed_transports,
        )
