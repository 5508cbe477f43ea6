"""The connected frontends: their hellos, the orders that they send, and the messages sent to them."""

from time import monotonic
from typing import Protocol

import structlog
import zmq

from penstock.config import Config
from penstock.config.parts import with_parts
from penstock.ipc.channel import PeerId, Router
from penstock.ipc.codec import Codec, MalformedMessage
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.messages import (
    AbortRequest,
    AddRequest,
    DrainEngine,
    EngineNotReady,
    EngineReady,
    FromFrontend,
    FrontendHello,
    Goodbye,
    Heartbeat,
    ListRequests,
    Message,
    NoteCulprit,
    PauseRequest,
    Probe,
    ProfileSteps,
    Refused,
    ResetPrefixCache,
    ResumeRequest,
    SayHello,
)

log = structlog.get_logger()

Order = (
    AddRequest
    | AbortRequest
    | PauseRequest
    | ResumeRequest
    | ResetPrefixCache
    | ProfileSteps
    | ListRequests
    | DrainEngine
    | NoteCulprit
)
"""The messages that a frontend may send after its hello. Parts have more."""


class Listener(Protocol):
    """Handles what frontends send (`Engine`)."""

    def why_not(self, protocol_version: int, model_fingerprint: str) -> str:
        """Return why a frontend with this hello is refused; empty if it is accepted."""

    def readiness(self) -> EngineReady | EngineNotReady:
        """Return the message that a new frontend gets first."""

    def on_frontend(self, peer: PeerId, hello: FrontendHello) -> None:
        """A frontend has said hello."""

    def on_order(self, peer: PeerId, order: Order | Message) -> None:
        """A frontend has sent an order."""

    def on_frontend_gone(self, peer: PeerId) -> int:
        """A frontend has left, or counts as gone; return how many requests it had."""


class Frontends:
    """The frontends that have said hello, and the socket to them."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: Config, keys: ChannelKeys | None, listener: Listener
    ) -> None:
        self._listener = listener
        self._timeout = config.ipc.heartbeat_timeout
        self._heard: dict[PeerId, float] = {}  # when each was last heard from, in order of hellos
        self.channel: Router[FromFrontend] = Router(
            context,
            config.ipc.frontend_address,
            Codec(with_parts(FromFrontend, "FROM_FRONTEND")),
            self._on_message,
            keys=keys,
        )

    def tell(self, peer: PeerId, message: Message) -> None:
        """Send a message to a frontend; it counts as gone if its queue is full."""
        if not self.channel.send(peer, message):
            self._drop(peer, "it does not read its messages")

    def tell_all(self, message: Message) -> None:
        """Send a message to all; `beat` notices the frontends that do not get it."""
        self.channel.broadcast(self._heard, message)

    def beat(self, now: float) -> None:
        """Send all frontends a heartbeat, and drop those that are silent or no longer connected."""
        for peer in [peer for peer, heard in self._heard.items() if now - heard > self._timeout]:
            self._drop(peer, "silent for too long")
        for peer in self.channel.broadcast(self._heard, Heartbeat()):
            self._drop(peer, "no longer connected")

    def _on_message(self, peer: PeerId, message: FromFrontend) -> None:
        if isinstance(message, FrontendHello):
            self._on_hello(peer, message)
            return
        if isinstance(message, Probe):
            self.channel.send(peer, self._listener.readiness())
            return
        if peer not in self._heard:
            if isinstance(message, Goodbye):
                return
            self.channel.send(peer, SayHello())
            raise MalformedMessage("it has not said hello")
        self._heard[peer] = monotonic()
        if isinstance(message, Goodbye):
            self._drop(peer, "it left")
        elif not isinstance(message, Heartbeat):
            self._listener.on_order(peer, message)

    def _on_hello(self, peer: PeerId, hello: FrontendHello) -> None:
        if refusal := self._listener.why_not(hello.protocol_version, hello.model_fingerprint):
            log.error("frontend refused", name=hello.name, reason=refusal)
            self.channel.send(peer, Refused(refusal))
            return
        if peer in self._heard:  # it has restarted and lost its state
            self._drop(peer, "it said hello again")
        self._heard[peer] = monotonic()
        log.info("frontend connected", name=hello.name)
        self.channel.send(peer, self._listener.readiness())
        self._listener.on_frontend(peer, hello)

    def _drop(self, peer: PeerId, why: str) -> None:
        if self._heard.pop(peer, None) is not None:
            num_aborted = self._listener.on_frontend_gone(peer)
            log.info("frontend gone", peer=peer.decode(errors="replace"), why=why, aborted_requests=num_aborted)
