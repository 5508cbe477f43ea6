"""How every ZeroMQ socket of Penstock is set up: with bounded message counts and sizes, and without lingering."""

import secrets

import zmq

from penstock.ipc.addresses import is_tcp
from penstock.ipc.curve import secure_caller, secure_listener
from penstock.ipc.key_file import ChannelKeys

MAX_QUEUED_MESSAGES = 10_000
MAX_MESSAGE_BYTES = 64 << 20  # the largest message is a plan with many new long prompts


def router(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    peer_timeout: float | None = None,
    keys: ChannelKeys | None = None,
) -> zmq.Socket[bytes]:
    """A bound ROUTER. Sending to an absent or stalled peer raises instead of dropping silently.

    A peer whose process is stopped, or whose host is gone, is disconnected after `peer_timeout` seconds, if given.
    Pings are answered by the socket's own thread, so a peer that computes for long is not affected.

    With `keys`, only peers that the context's `Doorkeeper` knows can use a tcp:// address.
    """
    socket = _bounded(context.socket(zmq.ROUTER))
    if peer_timeout is not None:
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(peer_timeout * 1000 / 4)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(peer_timeout * 1000)))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects takes over its identity
    if keys is not None and is_tcp(address):
        secure_listener(socket, keys)
    socket.bind(address)
    return socket


def new_identity(name: str) -> bytes:
    """The name with a random part, so that two processes with the same name are two peers."""
    return f"{name}.{secrets.token_hex(4)}".encode()


def dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    name: str,
    keys: ChannelKeys | None = None,
    identity: bytes | None = None,
) -> zmq.Socket[bytes]:
    """A connecting DEALER. It reconnects by itself, under the same identity, for as long as it lives.

    The identity is made from the name, or that of an earlier socket, which this socket then replaces at the listener.
    `keys` are needed if the listener at a tcp:// address has them.
    """
    socket = _bounded(context.socket(zmq.DEALER))
    socket.setsockopt(zmq.ROUTING_ID, identity or new_identity(name))
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if keys is not None and is_tcp(address):
        secure_caller(socket, keys)
    socket.connect(address)
    return socket


def _bounded(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket
