"""How schedulers are reached: their addresses, and connections over sockets or a replacement for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from penstock.config.options import Config, channel_keys
from penstock.config.parts import with_parts
from penstock.ipc.addresses import addresses_in
from penstock.ipc.channel import Dealer
from penstock.ipc.codec import Codec
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.messages import Message, ToFrontend


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """How to reach a scheduler, and the content of the hello."""

    address: str
    name: str  # unique among frontends; also the socket's identity
    model_fingerprint: str
    heartbeat_interval: float = 1.0  # seconds
    heartbeat_timeout: float = 10.0
    keys: ChannelKeys | None = None
    label: str = ""  # the engine's, if there are several


def engine_addresses(config: Config, name: str, model_fingerprint: str) -> list[EngineAddress]:
    """The addresses of all engines, in the order of their numbers.

    Raises:
        ConfigError: if the key file cannot be used.
    """
    ipc, keys = config.ipc, channel_keys(config)
    addresses = addresses_in(ipc.frontend_address)
    labels = [str(number) for number in range(len(addresses))] if len(addresses) > 1 else [""]
    return [
        EngineAddress(address, name, model_fingerprint, ipc.heartbeat_interval, ipc.heartbeat_timeout, keys, label)
        for label, address in zip(labels, addresses, strict=True)
    ]


class Channel(Protocol):
    """One connection to a scheduler."""

    def send(self, message: Message) -> bool:
        """Queue a message; False if the queue is full."""
        ...

    def close(self) -> None:
        """Close it; idempotent."""
        ...


Connect = Callable[[EngineAddress, Callable[[ToFrontend], None], Callable[[], None]], Channel]
"""Connects to an address. The first callback gets each message, the second one is called if the connection breaks."""


def over_sockets(context: zmq.Context[Any], on_dropped: Callable[[], object] = lambda: None) -> Connect:
    """Make connections over ZeroMQ; `on_dropped` is called for each message that cannot be read."""
    codec: Codec[ToFrontend] = Codec(with_parts(ToFrontend, "TO_FRONTEND"))
    return lambda to, on_message, on_broken: Dealer(
        context, to.address, to.name, codec, on_message, to.keys, on_dropped, on_broken
    )
