"""How every ZeroMQ socket of Penstock is set up: bounded in number and size of messages, never lingering."""

import secrets

import zmq

from penstock.ipc.addresses import is_tcp
from penstock.ipc.curve import secure_caller, secure_listener
from penstock.ipc.key_file import ChannelKeys

MAX_QUEUED_MESSAGES = 10_000
MAX_MESSAGE_BYTES = 64 << 20  # a plan that brings many long prompts at once is the largest message


def router(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    peer_timeout: float | None = None,
    keys: ChannelKeys | None = None,
) -> zmq.Socket[bytes]:
    """A bound ROUTER. Sending to an absent or stalled peer raises instead of dropping silently.

    With `peer_timeout` (seconds) a peer whose process does not run at all (stopped, or on a host that is gone)
    is disconnected. Its socket's own thread answers the pings: a peer that computes for long is not concerned.

    With `keys`, a tcp:// address is open only to those that the context's `Doorkeeper` knows.
    """
    socket = _bounded(context.socket(zmq.ROUTER))
    if peer_timeout is not None:
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(peer_timeout * 1000 / 4)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(peer_timeout * 1000)))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects takes its identity over
    if keys is not None and is_tcp(address):
        secure_listener(socket, keys)
    socket.bind(address)
    return socket


def new_identity(name: str) -> bytes:
    """The name with a random part: two processes of one name stay two peers."""
    return f"{name}.{secrets.token_hex(4)}".encode()


def dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    name: str,
    keys: ChannelKeys | None = None,
    identity: bytes | None = None,
) -> zmq.Socket[bytes]:
    """A connecting DEALER. It reconnects by itself, under the same identity, for as long as it lives.

    The identity is a new one for the name, or that of an earlier socket, whose place this one takes at the listener.
    `keys` are needed where the listener at a tcp:// address has them.
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
