"""What a worker tells readers of its KV pages: which layers of them are complete, while a step computes them.

    OfferKV, then its plan ──▶ KVPages to the reader
    layers of the step end ──▶ KVLayers: these can be read      (if the kernels count layers; else when the step ends)
    ReadKV                 ──▶ KVData, for readers that cannot reach the pool themselves

A thread has the socket, so that readers are served during steps. A reader may connect at any time, and gets everything
from the beginning. The scheduler keeps the pages until it has been told that they were read.
"""

import os
import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
import torch
import zmq
from torch import Tensor

from penstock.ipc import sockets
from penstock.ipc.codec import Codec, MalformedMessage, unpack_int32
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.messages import Message
from penstock.parts.handover.messages import (
    FollowKV,
    FromReader,
    KVData,
    KVLayers,
    KVPages,
    OfferKV,
    ReadKV,
    UnfollowKV,
    WithdrawKV,
)
from penstock.parts.handover.worker.transports.transport import Pool

log = structlog.get_logger()

_LOOK_MS = 1
"""While a step computes offered pages, the thread checks its progress this often."""


class _Offer:
    def __init__(self, message: OfferKV) -> None:
        self.step_id = message.step_id
        self.pages = message.pages
        self.num_layers = 0  # layers that can be read
        self.num_told = -1  # layers that the reader has been told of; -1: it does not know the pages yet


class _Handover:
    def __init__(self) -> None:
        self.offers: list[_Offer] = []
        self.reader = b""  # identity; empty: none yet


class Progress(NamedTuple):
    """The progress of the current step."""

    counter: npt.NDArray[np.int64]  # [1]: layers of the model that have written their KV; the kernels update it
    kv_layers: list[int]  # for 0, 1, ... such layers: how many layers of the pool are complete


class Offers:
    """All methods except those of the thread run in the worker's main thread, and none of them waits."""

    def __init__(
        self,
        pool: Pool,
        num_layers: int,
        progress: Progress | None,
        address: str,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ChannelKeys | None,
    ) -> None:
        """
        Args:
            pool: the pages.
            num_layers: layers in the pool.
            progress: None if layers are not counted.
            address: where to listen; port 0 for any port.
            context: of the socket.
            keys: needed if the address is tcp://.
        """
        self._pool = pool
        self._num_layers = num_layers
        self._progress = progress
        self._lock = threading.Lock()  # guards all fields below
        self._handovers: dict[str, _Handover] = {}
        self._step_id = -1  # of the current step
        self._is_closed = False
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._codec: Codec[FromReader] = Codec(FromReader)
        self._socket = sockets.router(context, address, None, keys)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="kv-offers", daemon=True)
        self._thread.start()

    # --- in the main thread -------------------------------------------------------------------

    def offer(self, message: OfferKV) -> None:
        """Offer pages that the next step fills."""
        with self._lock:
            self._handovers.setdefault(message.handover_id, _Handover()).offers.append(_Offer(message))

    def withdraw(self, message: WithdrawKV) -> None:
        """Withdraw pages that are given to other sequences."""
        with self._lock:
            self._handovers.pop(message.handover_id, None)

    def begin_step(self, step_id: int) -> None:
        """Note that a step begins; call this before anything is launched."""
        if not self._handovers:
            return
        with self._lock:
            if self._progress is not None:
                self._progress.counter[0] = 0
            self._step_id = step_id
        self._wake()

    def end_step(self, step_id: int) -> None:
        """Note that a step has been computed."""
        if not self._handovers:
            return
        with self._lock:
            for offer in self._offers_of(step_id):
                offer.num_layers = self._num_layers
            if self._step_id == step_id:
                self._step_id = -1
        self._wake()

    def clear(self) -> None:
        """The scheduler starts afresh: withdraw all offers."""
        with self._lock:
            # Readers do not wait for our scheduler: one may follow a handover that the new one is about to offer.
            followed = {name: each for name, each in self._handovers.items() if each.reader and not each.offers}
            self._handovers = followed
            self._step_id = -1

    def close(self) -> None:
        """End the thread, and close the socket."""
        with self._lock:
            self._is_closed = True
        self._wake()
        self._thread.join()
        self._socket.close()
        os.close(self._news)

    def _wake(self) -> None:
        os.eventfd_write(self._news, 1)

    def _offers_of(self, step_id: int) -> list[_Offer]:
        return [offer for handover in self._handovers.values() for offer in handover.offers if offer.step_id == step_id]

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._news, zmq.POLLIN)
        while True:
            with self._lock:
                if self._is_closed:
                    return
                is_computing = self._look()
                self._tell()
            ready = dict(poller.poll(_LOOK_MS if is_computing else None))
            if self._news in ready:
                os.eventfd_read(self._news)
            if self._socket in ready:
                self._hear()

    def _look(self) -> bool:
        """Check the progress of the current step; return whether to check again soon."""
        if self._step_id < 0 or self._progress is None:
            return False
        counter, kv_layers = self._progress
        done = kv_layers[min(int(counter[0]), len(kv_layers) - 1)]
        offers = self._offers_of(self._step_id)
        for offer in offers:
            offer.num_layers = max(offer.num_layers, done)
        return bool(offers) and done < self._num_layers

    def _tell(self) -> None:
        for handover_id, handover in self._handovers.items():
            if handover.reader:
                for number, offer in enumerate(handover.offers):
                    if offer.num_told < offer.num_layers or offer.num_told < 0:
                        if offer.num_told < 0:
                            self._send(handover.reader, KVPages(handover_id, number, offer.pages))
                        if offer.num_layers:
                            self._send(handover.reader, KVLayers(handover_id, number, offer.num_layers))
                        offer.num_told = offer.num_layers

    def _hear(self) -> None:
        while True:
            try:
                reader, frame = self._socket.recv_multipart(zmq.NOBLOCK)
                self._on_message(reader, self._codec.decode(frame))
            except zmq.Again:
                return
            except (MalformedMessage, ValueError):
                continue
            except Exception:  # the thread must go on: others wait for its answers
                log.exception("KV reader not answered")

    def _on_message(self, reader: bytes, message: FromReader) -> None:
        match message:
            case FollowKV():
                with self._lock:
                    handover = self._handovers.setdefault(message.handover_id, _Handover())
                    handover.reader = reader
                    for offer in handover.offers:
                        offer.num_told = -1
            case UnfollowKV():
                with self._lock:
                    if (followed := self._handovers.get(message.handover_id)) is not None:
                        followed.reader = b""
                        if not followed.offers:
                            del self._handovers[message.handover_id]
            case ReadKV():
                self._answer(reader, message)

    def _answer(self, reader: bytes, message: ReadKV) -> None:
        pages = torch.tensor(unpack_int32(message.pages), dtype=torch.int64)
        blocks = self._pool.blocks
        parts, num_pages, _ = blocks.shape
        if not 0 <= message.first_part <= message.end_part <= parts or not len(pages):
            return
        if not 0 <= int(pages.min()) <= int(pages.max()) < num_pages:
            return
        part, read = blocks[message.first_part : message.end_part], list[Tensor]()
        self._pool.copy(lambda: read.append(part.index_select(1, pages.to(blocks.device)).cpu()))
        self._send(reader, KVData(message.read_id), read[0].view(torch.uint8).flatten().numpy().data)

    def _send(self, reader: bytes, message: Message, *more: memoryview) -> None:
        try:
            self._socket.send_multipart((reader, self._codec.encode(message), *more), zmq.NOBLOCK, copy=not more)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
