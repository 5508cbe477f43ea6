"""Both sides of handovers (disaggregated prefill), as the scheduler uses them. One engine may be both at once."""

from collections.abc import Iterable

from penstock.core.kv.kv_pages import KVPages
from penstock.core.scheduling.handover.arrivals import Arrivals, HandoverTotals, Namespace, Order, Peers
from penstock.core.scheduling.handover.departures import Departures
from penstock.core.sequences.sequence import Owner, Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.plan_builder import Chunk
from penstock.ipc.messages import HandoverStats

__all__ = ["Handovers", "Peers"]


class Handovers:
    """The pages that one worker's pool gets from other engines, and those that it has for them."""

    __slots__ = ("_totals", "arrivals", "departures")

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
        if before is not None:
            before.arrivals.abandon()
            self.arrivals.orders, self.arrivals.peers = before.arrivals.orders, before.arrivals.peers

    def advance(self) -> list[Request]:
        """Do what is due before the next plan. Returns the other engines' requests that must end."""
        self.arrivals.expire()
        return self.departures.take_broken()

    def make_way(self, *, is_idle: bool) -> bool:
        """The next request lacks pages. Returns whether it may have more now. `is_idle`: nothing runs.

        Pages that arrived since it began to wait count too: if nothing runs, nothing else would end its wait.
        """
        if self.arrivals.unpin():
            return True
        if is_idle and self.departures.unfinished():  # two engines whose roles change could wait for each other
            self.arrivals.give_up_one()
        return False

    def planned(self, chunks: Iterable[Chunk], step_id: int) -> None:
        """A plan has these chunks: offer the pages that they complete."""
        self.departures.offer(chunks, step_id)

    def keeps(self, seq: Sequence) -> bool:
        """A sequence is about to lose its row. Returns whether its pages are kept: they must not be released."""
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
