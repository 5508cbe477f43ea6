"""Both sides of a handover between prefill and decode engines, for the worker's loop."""

import os
import socket as sockets_of_host
from urllib.parse import urlsplit

import numpy as np
import zmq
from msgspec.structs import replace

from penstock.config import Config, ConfigError, channel_keys
from penstock.config.ranks import Rank
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.model import CountsLayers, Model
from penstock.gpu_worker.part import Context, WorkerPart
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.ipc.addresses import is_tcp
from penstock.ipc.curve import Doorkeeper
from penstock.ipc.messages import KVSource, StepResult, WorkerHello
from penstock.parts.handover.messages import KVReceived, OfferKV, ReceiveKV, StopReceivingKV, WithdrawKV
from penstock.parts.handover.options import HandoverOptions
from penstock.parts.handover.worker.offers import Offers, Progress
from penstock.parts.handover.worker.pages import described, kv_layers_done
from penstock.parts.handover.worker.receiver import Place, Receiver
from penstock.parts.handover.worker.transports.registry import make_transports
from penstock.parts.handover.worker.transports.transport import Pool, TransportError

Order = OfferKV | WithdrawKV | ReceiveKV | StopReceivingKV


class Handover(WorkerPart):
    """The pages that other workers read from this one, and those that it reads from them."""

    orders = (OfferKV, WithdrawKV, ReceiveKV, StopReceivingKV)

    @classmethod
    def needs_shared_pages(cls, config: Config) -> bool:
        return bool(config.of(HandoverOptions).role)

    @classmethod
    def of(cls, context: Context) -> "Handover | None":
        if not context.config.of(HandoverOptions).role:
            return None
        return cls(context.config, context.rank, context.hello, context.kv, context.model, context.device)

    def __init__(
        self, config: Config, rank: Rank, hello: WorkerHello, kv: KVPool, model: Model, device: Device
    ) -> None:
        """Raises ConfigError if the wanted transport or address cannot be used."""
        keys, lanes, wanted = channel_keys(config), device.lanes(), config.of(HandoverOptions).kv_transport
        pool = Pool(kv.blocks, kv.shared, None if lanes is None else lanes[1])
        try:
            transports = make_transports(wanted, pool)
        except TransportError as error:
            raise ConfigError(f"kv_transport {wanted}: {error}") from None
        address = _address(config, rank)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._doorkeeper = Doorkeeper(self._context, keys) if keys is not None and is_tcp(address) else None
        num_layers = sum(len(group.layers) for group in kv.groups)
        counter = np.zeros(1, dtype=np.int64)
        progress = None
        if kv.blocks.device.type == "cpu" and isinstance(model, CountsLayers):
            model.count_layers(counter)
            progress = Progress(counter, kv_layers_done(model.config))
        try:
            self._offers = Offers(pool, num_layers, progress, address, self._context, keys)
        except zmq.ZMQError as error:
            raise ConfigError(f"--kv-transfer-address {address}: {error.strerror}") from None
        self._receiver = Receiver(kv, transports, Place(self._context, keys, rank.number))
        places = {name: place for name, each in transports.items() if (place := each.place()) is not None}
        pages = described(hello, kv)
        self.source = KVSource(_reached(self._offers.address, address), tuple(transports), pages, places)
        """How other workers can read this worker's pages."""

    def hello(self, hello: WorkerHello) -> WorkerHello:
        return replace(hello, kv_sources=(self.source,))

    @property
    def is_busy(self) -> bool:
        """Whether there are answers to take, now or soon."""
        return self._receiver.is_busy

    def order(self, message: Order) -> None:
        """Begin what the scheduler has decided."""
        match message:
            case OfferKV():
                self._offers.offer(message)
            case WithdrawKV():
                self._offers.withdraw(message)
            case ReceiveKV() | StopReceivingKV():
                self._receiver.order(message)

    def take_done(self) -> list[KVReceived]:
        """Return the answers that have become ready."""
        return self._receiver.take_done()

    def begin_step(self, step_id: int) -> None:
        """Note that a step is about to be launched."""
        self._offers.begin_step(step_id)
        self._receiver.begin_step(step_id)

    def end_step(self, result: StepResult) -> None:
        """Note that a step has been computed."""
        self._offers.end_step(result.step_id)
        self._receiver.end_step(result.step_id)

    def begin(self) -> None:
        """The scheduler starts afresh: withdraw all offers, and write nothing more for its earlier orders."""
        self._offers.clear()
        self._receiver.clear()

    def close(self) -> None:
        """End the threads."""
        self._receiver.close()
        self._offers.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()


def _address(config: Config, rank: Rank) -> str:
    """The address to which this rank's readers connect."""
    wanted, worker = config.of(HandoverOptions).kv_transfer_address, config.ipc.worker_address
    if wanted:
        parts = urlsplit(wanted)
        return f"tcp://{parts.hostname}:{parts.port + rank.number if parts.port else '*'}"
    if not is_tcp(worker):
        return f"{worker.removesuffix('.sock')}-kv-{os.getpid()}.sock"
    raise ConfigError("--role needs --kv-transfer-address where workers are reached by --worker-address tcp://")


def _reached(bound: str, wanted: str) -> str:
    """The address at which other hosts reach a socket: with a name instead of the interface to which it is bound."""
    if not is_tcp(bound):
        return bound
    host = urlsplit(wanted).hostname or "*"
    host = sockets_of_host.gethostname() if host in ("*", "0.0.0.0") else host
    return f"tcp://{host}:{urlsplit(bound).port}"
