"""The connections of a decode engine to the engines that compute prompts for it.

    AddRequest names an address ──▶ connect, say hello as a frontend would ──▶ EngineReady: its pages are compared
          with ours, and it is a peer; or it is refused, with what differs
    EngineNotReady, SayHello, silence, or a broken connection ──▶ it is no peer any more, and its handovers are lost

A broken connection is noticed at once, not only when heartbeats stop: streams wait for a dead engine's prompts.
"""

from collections.abc import Iterable
from time import monotonic
from typing import Protocol

import structlog
import zmq

from penstock.config import Config
from penstock.config.parts import with_parts
from penstock.ipc.channel import Dealer
from penstock.ipc.codec import Codec
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    EngineNotReady,
    EngineReady,
    FrontendHello,
    Goodbye,
    HandoverReleased,
    Heartbeat,
    KVSource,
    Message,
    Refused,
    SayHello,
    SequenceDelta,
    ToFrontend,
    TokenBatch,
)

log = structlog.get_logger()

MAX_LINKS = 64


class Listener(Protocol):
    """Gets the messages of prefill engines (`Engine`)."""

    def own_pages(self) -> tuple[str, tuple[KVSource, ...]]:
        """Return the fingerprint of the model, and how our own ranks' pages are read."""

    def on_peers(self) -> None:
        """A prefill engine has come, or is lost."""

    def on_computed(self, delta: SequenceDelta) -> None:
        """A prefill engine has computed a prompt, or failed."""

    def on_released(self, message: HandoverReleased) -> None:
        """A prefill engine says whether the pages that were read are valid."""


class PrefillLinks:
    """All connections, by address. Lives in a running event loop until `close`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: Config,
        keys: ChannelKeys | None,
        listener: Listener,
    ) -> None:
        self.peers: dict[str, tuple[KVSource, ...] | None] = {}
        """Address -> state, as in `Peers` of `parts/handover/scheduler/arrivals.py`."""
        self.context = context
        self._ipc = config.ipc
        self.keys = keys
        self.listener = listener
        self._links: dict[str, _Link] = {}

    def connect(self, addresses: Iterable[str]) -> None:
        """Connect to the engines that a request names, unless already connected."""
        for address in addresses:
            if address not in self._links and len(self._links) < MAX_LINKS:
                self.peers[address] = None
                self._links[address] = _Link(self, address)

    def send(self, address: str, message: Message) -> None:
        """Send a message; no effect if the engine is no longer connected."""
        link = self._links.get(address)
        if link is not None and not link.channel.send(message):
            self._drop(link, "its queue is full")

    def beat(self, now: float) -> None:
        """Send all engines a heartbeat, and drop the silent ones."""
        for link in list(self._links.values()):
            if now - link.heard_at > self._ipc.heartbeat_timeout:
                self._drop(link, "silent for too long")
            else:
                self.send(link.address, Heartbeat())

    def worker_changed(self) -> None:
        """Our own pages may have changed: compare again."""
        for link in self._links.values():
            if link.facts is not None:
                self._judge(link, link.facts)

    def close(self) -> None:
        """Say goodbye to all and close the connections."""
        for link in self._links.values():
            link.channel.send(Goodbye())
            link.close()
        self._links.clear()

    # --- events of links ------------------------------------------------------------------------

    def hear(self, link: "_Link", message: ToFrontend) -> None:
        """A message has arrived."""
        link.heard_at = monotonic()
        match message:
            case TokenBatch():
                for delta in message.deltas:
                    if delta.finish_reason is not None:
                        self.listener.on_computed(delta)
            case HandoverReleased():
                self.listener.on_released(message)
            case EngineReady():
                link.facts = message
                self._judge(link, message)
            case EngineNotReady() | Refused():
                link.facts = None
                self._lose(link, message.reason)
            case SayHello():
                link.facts = None
                self._lose(link, "it was restarted")
                link.say_hello()
            case _:
                pass

    def broke(self, link: "_Link") -> None:
        """The connection is gone; the socket reconnects by itself."""
        link.facts = None
        self._lose(link, "the connection broke")
        link.say_hello()  # to the next process at that address

    def _judge(self, link: "_Link", facts: EngineReady) -> None:
        fingerprint, own = self.listener.own_pages()
        if refusal := unlike(fingerprint, own, facts):
            self._lose(link, refusal)
            return
        if self.peers.get(link.address) != facts.kv_sources:
            log.info("prefill engine connected", address=link.address)
            if self.peers.get(link.address):
                self.peers[link.address] = None  # it has new workers: its old pages are lost
                self.listener.on_peers()
            self.peers[link.address] = facts.kv_sources
            self.listener.on_peers()

    def _lose(self, link: "_Link", reason: str) -> None:
        if self.peers.get(link.address, ()) != ():
            log.warning("prefill engine lost", address=link.address, reason=reason)
        elif link.address in self.peers and link.reason != reason:
            log.warning("prefill engine not used", address=link.address, reason=reason)
        link.reason = reason
        self.peers[link.address] = ()
        self.listener.on_peers()

    def _drop(self, link: "_Link", reason: str) -> None:
        """Close the link; the next request that names its address connects again."""
        self._lose(link, reason)
        del self.peers[link.address], self._links[link.address]
        link.close()
        self.listener.on_peers()


class _Link:
    """The connection to one prefill engine."""

    def __init__(self, links: PrefillLinks, address: str) -> None:
        self.address = address
        self.reason = ""  # why the engine is not used
        self.heard_at = monotonic()
        self.facts: EngineReady | None = None  # while it is ready
        self._links = links
        self.channel: Dealer[ToFrontend] = Dealer(
            links.context,
            address,
            "decode-engine",
            Codec(with_parts(ToFrontend, "TO_FRONTEND")),
            lambda message: links.hear(self, message),
            links.keys,
            on_broken=lambda: links.broke(self),
        )
        self.say_hello()

    def say_hello(self) -> None:
        fingerprint, _ = self._links.listener.own_pages()
        self.channel.send(FrontendHello(PROTOCOL_VERSION, "decode-engine", fingerprint))

    def close(self) -> None:
        self.channel.close()


def unlike(fingerprint: str, own: tuple[KVSource, ...], theirs: EngineReady) -> str:
    """Return why another engine's pages cannot be used here, with both values; empty if they can."""
    if theirs.model_fingerprint != fingerprint:
        return f"its model is {theirs.model_fingerprint}, ours {fingerprint}"
    if not theirs.kv_sources:
        return "it was started without --role, and hands no pages over"
    if len(theirs.kv_sources) != len(own):
        return f"it has {len(theirs.kv_sources)} ranks, we have {len(own)}: rank reads from rank"
    for rank, (ours, other) in enumerate(zip(own, theirs.kv_sources, strict=True)):
        of_theirs = dict(other.pages)
        for name, value in ours.pages:
            if of_theirs.get(name, "unknown") != value:
                return f"{name} is {of_theirs.get(name, 'unknown')} there, {value} here (rank {rank})"
        if not set(ours.transports) & set(other.transports):
            return (
                f"its pages can be read by {' or '.join(other.transports) or 'nothing'}, "
                f"ours by {' or '.join(ours.transports) or 'nothing'}"
            )
    return ""
