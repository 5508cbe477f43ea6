"""Typed channels over ZeroMQ: `Router` and `Dealer` for asyncio, `SyncDealer` for a plain loop.

The asyncio channels drain the socket from `loop.add_reader` and pass every message to a callback, which costs about
20 us less per message than a future per receive. ZeroMQ's descriptor is edge-triggered: it becomes readable when
something *changed*, so each event must drain the whole socket. Any other call on the socket, successful or not, may
consume the change unseen. So after every such call the socket must be checked again, on every path out.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import zmq
import zmq.backend

from penstock.ipc import sockets
from penstock.ipc.codec import Codec, MalformedMessage
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.messages import Message

In = TypeVar("In")
PeerId = bytes

_MAX_MESSAGES_PER_DRAIN = 256
"""A flooding peer must not starve the rest of the event loop: further messages follow in the loop's next turn."""


_send, _MORE, _LAST = zmq.backend.Socket.send, int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
"""pyzmq's inner send. The public one checks and converts, which takes twice as long as sending, for every rank."""


class _BrokenConnections:
    """Reports when a connection of a socket breaks: at once if the process at the other end ends."""

    def __init__(self, socket: zmq.Socket[bytes], on_broken: Callable[[], object]) -> None:
        self._on_broken = on_broken
        self._socket = socket
        self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._descriptor = self._events.fileno()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)
        self._is_closed = False

    def _drain(self) -> None:
        has_broken = False
        while not self._is_closed:
            try:
                self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            has_broken = True
        if has_broken:
            self._on_broken()

    def close(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._descriptor)
        self._socket.disable_monitor()
        self._events.close(linger=0)


class _AsyncChannel:
    """What the two asyncio channels share: drain when readable, look again after a send.

    A message that is malformed, or that makes `on_message` raise MalformedMessage, is dropped and counted.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_dropped: Callable[[], object] = lambda: None,
        on_broken: Callable[[], object] | None = None,
    ) -> None:
        self._socket = socket
        self._on_dropped = on_dropped
        self._broken = None if on_broken is None else _BrokenConnections(socket, on_broken)
        self._loop = asyncio.get_running_loop()
        self._drain_is_scheduled = False
        self._is_closed = False
        self.num_dropped = 0
        self._loop.add_reader(socket.fileno(), self._drain)
        self._schedule_drain()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def _drain(self) -> None:
        self._drain_is_scheduled = False
        for _ in range(_MAX_MESSAGES_PER_DRAIN):
            if self._is_closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._deliver(frames)
            except MalformedMessage:
                self.num_dropped += 1
                self._on_dropped()
            except BaseException:  # raised by the callback; later messages must still be delivered
                self._schedule_drain()
                raise
        self._schedule_drain()

    def _deliver(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _schedule_drain(self) -> None:
        if not self._drain_is_scheduled:
            self._drain_is_scheduled = True
            self._loop.call_soon(self._drain)

    def _look_again(self) -> None:
        if not self._is_closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._schedule_drain()

    def close(self) -> None:
        """Close the socket; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._socket.fileno())
            if self._broken is not None:
                self._broken.close()
            self._socket.close()


class Router(_AsyncChannel, Generic[In]):
    """The bound side with many peers. `on_message(peer, message)` is called for each valid message."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        codec: Codec[In],
        on_message: Callable[[PeerId, In], None],
        peer_timeout: float | None = None,
        keys: ChannelKeys | None = None,
        on_broken: Callable[[], object] | None = None,
    ) -> None:
        """`on_broken` is called when a peer's connection breaks; soon after, sending to that peer fails."""
        self._codec = codec
        self._on_message = on_message
        socket = sockets.router(context, address, peer_timeout, keys)
        super().__init__(socket, on_broken=on_broken)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: PeerId, message: Message) -> bool:
        """Queue a message for a peer; False if the peer is not connected or its queue is full."""
        return not self.broadcast((peer,), message)

    def broadcast(self, peers: Iterable[PeerId], message: Message) -> list[PeerId]:
        """Encode a message once and queue it for each peer. Returns those not connected or with a full queue."""
        frame, missed, socket = self._codec.encode(message), [], self._socket
        try:
            for peer in peers:
                try:
                    _send(socket, peer, _MORE)
                    _send(socket, frame, _LAST)
                except zmq.ZMQError as error:
                    if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                        raise
                    missed.append(peer)
        finally:
            self._look_again()
        return missed

    def _deliver(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise MalformedMessage(f"{len(frames)} frames instead of 2")
        self._on_message(frames[0], self._codec.decode(frames[1]))


class Dealer(_AsyncChannel, Generic[In]):
    """The connecting side. `on_message(message)` is called for each valid message."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        name: str,
        codec: Codec[In],
        on_message: Callable[[In], None],
        keys: ChannelKeys | None = None,
        on_dropped: Callable[[], object] = lambda: None,
        on_broken: Callable[[], object] | None = None,
    ) -> None:
        """`on_broken` is called when the connection breaks; the socket reconnects by itself."""
        self._codec = codec
        self._on_message = on_message
        super().__init__(sockets.dealer(context, address, name, keys), on_dropped, on_broken)

    def send(self, message: Message) -> bool:
        """Queue a message (also while the other side is away); False if the queue is full."""
        try:
            self._socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._look_again()
        return True

    def _deliver(self, frames: list[bytes]) -> None:
        if len(frames) != 1:
            raise MalformedMessage(f"{len(frames)} frames instead of 1")
        self._on_message(self._codec.decode(frames[0]))


class SyncDealer(Generic[In]):
    """The connecting side for a process without an event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        name: str,
        codec: Codec[In],
        keys: ChannelKeys | None = None,
    ) -> None:
        identity = sockets.new_identity(name)
        self._connect: Callable[[], zmq.Socket[bytes]] = lambda: sockets.dealer(context, address, name, keys, identity)
        self._codec = codec
        self.num_dropped = 0
        self._open()

    def _open(self) -> None:
        self.socket = self._connect()
        """The socket, for polling it together with others."""
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)

    def send(self, message: Message) -> None:
        """Queue a message; blocks only when the queue is full."""
        self.socket.send(self._codec.encode(message))

    def receive(self, timeout_ms: int | None = None) -> In | None:
        """The next valid message; None if none came within `timeout_ms` (None waits for ever, 0 only looks)."""
        while True:
            try:  # usually the next plan has come already; polling first would cost more than receiving
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if timeout_ms == 0 or not self._poller.poll(timeout_ms):
                    return None
                continue
            try:
                if len(frames) == 1:
                    return self._codec.decode(frames[0])
            except MalformedMessage:
                pass
            self.num_dropped += 1

    def connect_again(self) -> None:
        """Open a new socket as the same peer; messages queued in the old one are dropped."""
        self.socket.close()
        self._open()

    def close(self) -> None:
        """Close the socket; queued messages are dropped."""
        self.socket.close()
