"""CURVE for tcp:// channels: encrypted, and closed to anyone without the launch's key file.

All processes of a launch share one key pair. With it the scheduler and its peers authenticate each other.
"""

import os
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from penstock.ipc.key_file import ChannelKeys, KeyFileError

_DOMAIN = "penstock"


def make_key_file(path: Path) -> None:
    """Write a new key pair to a new file that only its owner may read.

    Raises:
        FileExistsError: the file exists; processes may be using its keys.
        KeyFileError: if it cannot be written.
    """
    write_key_file(path, ChannelKeys(*zmq.curve_keypair()))


def write_key_file(path: Path, keys: ChannelKeys) -> None:
    """Write a key pair to a new file that only its owner may read.

    Raises:
        FileExistsError: the file exists; processes may be using its keys.
        KeyFileError: if it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise
    except OSError as error:
        raise KeyFileError(f"{str(path)!r} cannot be made: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(f"public = '{keys.public.decode()}'\nsecret = '{keys.secret.decode()}'\n")


def secure_listener(socket: zmq.Socket[bytes], keys: ChannelKeys) -> None:
    """Admit only peers that the context's `Doorkeeper` knows; call before binding."""
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.curve_server = True
    socket.zap_domain = _DOMAIN.encode()


def secure_caller(socket: zmq.Socket[bytes], keys: ChannelKeys) -> None:
    """Talk only to a listener that has the same keys; call before connecting."""
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.curve_serverkey = keys.public


class Doorkeeper:
    """Admits only peers with the launch's keys to a context's secured listeners. Runs in its own thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ChannelKeys) -> None:
        self._public = keys.public
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Called by ZeroMQ: whether to admit a peer that has proved that it owns this public key."""
        return key == self._public

    def close(self) -> None:
        """End the thread; no new peers are admitted."""
        self._authenticator.stop()
