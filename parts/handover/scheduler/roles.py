"""An engine's role: passes handovers between its scheduler and other engines."""

from typing import TYPE_CHECKING, Self

import structlog
from msgspec.structs import replace

from penstock.config import channel_keys
from penstock.core.engine.part import EnginePart, Steering
from penstock.core.sequences.intake import Refusal
from penstock.ipc.channel import PeerId
from penstock.ipc.codec import MalformedMessage
from penstock.ipc.messages import (
    AddRequest,
    EngineReady,
    HandoverReleased,
    HandoverTaken,
    KVSource,
    Role,
    SequenceDelta,
    SetRole,
    WorkerHello,
)
from penstock.parts.handover.options import HandoverOptions
from penstock.parts.handover.scheduler.handovers import Handovers
from penstock.parts.handover.scheduler.prefill_links import PrefillLinks

if TYPE_CHECKING:
    from penstock.core.engine.loop import Engine

log = structlog.get_logger()


class Roles(EnginePart):
    """The role, and the connections to other engines. An engine without `--role` has no connection."""

    orders = (HandoverTaken, SetRole)

    def __init__(self, engine: "Engine") -> None:
        config = engine.config
        role = config.of(HandoverOptions).role
        self.role: Role = role[0] if role else ""
        self._engine = engine
        self._links = PrefillLinks(engine.context, config, channel_keys(config), self) if self.role else None
        self._hello: WorkerHello | None = None

    @classmethod
    def of(cls, engine: "Engine") -> Self:
        return cls(engine)

    @property
    def _handovers(self) -> Handovers | None:
        """Those of the current workers."""
        scheduler = self._engine.scheduler
        return None if scheduler is None else scheduler.parts.get(Handovers)

    def on_workers(self, hello: WorkerHello) -> None:
        self._hello, handovers = hello, self._handovers
        if self._links is not None and handovers is not None:
            handovers.arrivals.peers = self._links.peers
            self._links.worker_changed()

    def facts(self, ready: EngineReady) -> EngineReady:
        sources = () if self._hello is None else self._hello.kv_sources
        return replace(ready, role=self.role, kv_sources=sources)

    def change(self, role: Role) -> bool:
        """Take another role. Returns whether it differs from the old one.

        Raises:
            MalformedMessage: if there is no role to change.
        """
        if not self.role:
            raise MalformedMessage("this engine was started without --role, so its role cannot change")
        if not role:
            raise MalformedMessage("an engine with a role keeps one: name another role")
        if role == self.role:
            return False
        log.info("role changed", before=self.role, now=role)
        self.role = role
        return True

    # --- frontends, and decode engines -------------------------------------------------------

    def order(self, peer: PeerId, message: HandoverTaken | SetRole) -> None:
        if isinstance(message, HandoverTaken):
            self._engine.frontends.tell(peer, self._taken(message, peer))
        elif self.change(message.role):
            self._engine.frontends.tell_all(self._engine.readiness())

    def on_request(self, request: AddRequest, refusal: Refusal | None) -> None:
        """A request may name prefill engines."""
        if self._links is not None and request.prefill_at:
            self._links.connect(request.prefill_at)

    def _taken(self, message: HandoverTaken, owner: PeerId) -> HandoverReleased:
        """Another engine has read the pages of a prompt; return the answer to it."""
        is_right = self._handovers is not None and self._handovers.departures.taken(message.request_id, owner)
        self._engine.changed()
        return HandoverReleased(message.request_id, is_right)

    def on_late(self, order: Steering, peer: PeerId) -> None:
        """Release the pages kept of the prompt, if any."""
        if self._handovers is not None and self._handovers.departures.leave(order.request_id, peer):
            self._engine.changed()

    @property
    def is_idle(self) -> bool:
        """Whether no other engine has yet to read pages that are kept here."""
        return self._handovers is None or not self._handovers.departures.holders()

    # --- to others ------------------------------------------------------------------------------

    def send(self) -> None:
        """Send prefill engines their orders and cancellations, even if there is no worker."""
        handovers = self._handovers
        if handovers is not None and self._links is not None:
            for order in handovers.take_orders():
                self._links.send(*order)

    def beat(self, now: float) -> None:
        """Send prefill engines a heartbeat."""
        if self._links is not None:
            self._links.beat(now)

    def close(self) -> None:
        """Say goodbye."""
        if self._links is not None:
            self._links.close()

    # --- messages of prefill engines ----------------------------------------------------------

    def own_pages(self) -> tuple[str, tuple[KVSource, ...]]:
        """Return the fingerprint of the model, and how our own ranks' pages are read."""
        return ("", ()) if self._hello is None else (self._hello.model_fingerprint, self._hello.kv_sources)

    def on_peers(self) -> None:
        """A prefill engine has come, or is lost."""
        if self._handovers is not None:
            self._handovers.arrivals.peers_changed()
            self._engine.changed()

    def on_computed(self, delta: SequenceDelta) -> None:
        """A prefill engine has computed a prompt, or failed."""
        if self._handovers is not None:
            what = delta.request_id, delta.error, delta.num_cached_tokens, delta.bill
            if self._handovers.arrivals.computed(*what) and delta.error:
                log.warning("handover failed, prefilling locally", handover_id=delta.request_id, reason=delta.error)
            self._engine.changed()

    def on_released(self, message: HandoverReleased) -> None:
        """A prefill engine says whether the pages that were read are valid."""
        if self._handovers is not None:
            self._handovers.arrivals.released(message)
            self._engine.changed()
