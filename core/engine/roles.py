"""An engine's role: passes handovers between the scheduler, its workers, and other engines."""

from collections.abc import Callable, Iterable

import structlog
import zmq

from penstock.config import Config
from penstock.core.engine.prefill_links import PrefillLinks
from penstock.core.scheduling.handover.handovers import Handovers
from penstock.core.sequences.sequence import Owner
from penstock.ipc.codec import MalformedMessage
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.messages import (
    HandoverReleased,
    HandoverTaken,
    KVReceived,
    KVSource,
    Message,
    Role,
    SequenceDelta,
    WorkerHello,
)
from penstock.parts.handover.options import HandoverOptions

log = structlog.get_logger()


class Roles:
    """The role, and the handovers of the current workers. Without `--role`, nothing happens here."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: Config,
        keys: ChannelKeys | None,
        send: Callable[[Message], bool],
        changed: Callable[[], None],
    ) -> None:
        """`send` sends to all workers; False if there are none. `changed`: called when there may be something to do."""
        role = config.of(HandoverOptions).role
        self.role: Role = role[0] if role else ""
        self._links = PrefillLinks(context, config, keys, self) if self.role else None
        self._send = send
        self._changed = changed
        self._hello: WorkerHello | None = None
        self._handovers: Handovers | None = None  # of the current workers

    def begin(self, hello: WorkerHello, handovers: Handovers | None) -> None:
        """Workers have come."""
        self._hello, self._handovers = hello, handovers
        if self._links is not None and handovers is not None:
            handovers.arrivals.peers = self._links.peers
            self._links.worker_changed()

    def follow(self, handovers: Handovers | None) -> None:
        """The workers are gone, and the scheduler has reset: use its new handovers."""
        self._handovers = handovers

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

    def connect(self, addresses: Iterable[str]) -> None:
        """A request names prefill engines."""
        if self._links is not None:
            self._links.connect(addresses)

    def taken(self, message: HandoverTaken, owner: Owner) -> HandoverReleased:
        """Another engine has read the pages of a prompt; return the answer to it."""
        is_right = self._handovers is not None and self._handovers.departures.taken(message.request_id, owner)
        self._changed()
        return HandoverReleased(message.request_id, is_right)

    def leave(self, request_id: str, owner: Owner) -> None:
        """A request is aborted that may have ended: release the pages kept of its prompt, if any."""
        if self._handovers is not None and self._handovers.departures.leave(request_id, owner):
            self._changed()

    @property
    def is_idle(self) -> bool:
        """Whether no other engine has yet to read pages that are kept here."""
        return self._handovers is None or not self._handovers.departures.holders()

    # --- to others ------------------------------------------------------------------------------

    def send_orders(self) -> None:
        """Send prefill engines their orders and cancellations, even if there is no worker."""
        if self._handovers is not None and self._links is not None:
            for order in self._handovers.take_orders():
                self._links.send(*order)

    def send_offers(self) -> bool:
        """Tell workers which offered pages the next plan completes; False if there are no workers any more."""
        return self._handovers is None or all(map(self._send, self._handovers.departures.take_messages()))

    def send_moves(self) -> bool:
        """Tell workers which pages to receive, or no longer; False if there are no workers any more."""
        if self._handovers is None:
            return True
        self.send_orders()
        return self.send_offers() and all(map(self._send, self._handovers.arrivals.take_messages()))

    def beat(self, now: float) -> None:
        """Send prefill engines a heartbeat."""
        if self._links is not None:
            self._links.beat(now)

    def close(self) -> None:
        """Say goodbye."""
        if self._links is not None:
            self._links.close()

    # --- messages of workers and prefill engines ----------------------------------------------

    def on_received(self, message: KVReceived) -> None:
        """Pages from another engine are there, or are no longer written to."""
        if self._handovers is not None:
            if error := self._handovers.arrivals.received(message):
                log.warning("handover failed, prefilling locally", handover_id=message.handover_id, reason=error)
            self._changed()

    def own_pages(self) -> tuple[str, tuple[KVSource, ...]]:
        """Return the fingerprint of the model, and how our own ranks' pages are read."""
        return ("", ()) if self._hello is None else (self._hello.model_fingerprint, self._hello.kv_sources)

    def on_peers(self) -> None:
        """A prefill engine has come, or is lost."""
        if self._handovers is not None:
            self._handovers.arrivals.peers_changed()
            self._changed()

    def on_computed(self, delta: SequenceDelta) -> None:
        """A prefill engine has computed a prompt, or failed."""
        if self._handovers is not None:
            what = delta.request_id, delta.error, delta.num_cached_tokens, delta.bill
            if self._handovers.arrivals.computed(*what) and delta.error:
                log.warning("handover failed, prefilling locally", handover_id=delta.request_id, reason=delta.error)
            self._changed()

    def on_released(self, message: HandoverReleased) -> None:
        """A prefill engine says whether the pages that were read are valid."""
        if self._handovers is not None:
            self._handovers.arrivals.released(message)
            self._changed()
