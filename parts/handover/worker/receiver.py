"""Fills pages from those of other engines, while steps run.

    ReceiveKV ──▶ follow the handover at the worker of the same rank there
    KVPages   ──▶ which of its pages go to which pages here
    KVLayers  ──▶ read these layers of the pages, by the best transport that both have
    all layers of all pages have arrived ──▶ KVReceived

A thread has the sockets and does all reads. It writes to the pool under a lock, so that nothing is written any more
once the scheduler has started afresh. Each link to another worker has a transport of its own: the best that both name
and that reaches the other worker, which shared memory does on one host only. A transport that fails is logged, and
switched off for this link if there is another one. The next handover uses that one.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.ipc import faults, sockets
from penstock.ipc.codec import Codec, MalformedMessage
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.messages import KVSource, Message
from penstock.parts.handover.messages import (
    FollowKV,
    KVData,
    KVLayers,
    KVPages,
    KVReceived,
    ReceiveKV,
    StopReceivingKV,
    ToReader,
    UnfollowKV,
)
from penstock.parts.handover.worker.pages import Columns, columns, parts_of
from penstock.parts.handover.worker.transports.transport import Read, Reader, Transport, TransportError

log = structlog.get_logger()

_POLL_MS = 1
"""How often to check reads that end without a message."""


class _Receipt:
    """A handover on the receiving side, for one rank."""

    def __init__(self, message: ReceiveKV, link: "_Link") -> None:
        self.handover_id = message.handover_id
        self.link = link
        pages = columns(message.pages)
        self.places = {(int(group), int(index)): int(page) for group, index, page in pages}
        self.num_missing = len(pages)  # pages with missing layers
        self.offers: dict[int, tuple[Columns, int]] = {}  # the offers' pages, and how many layers were requested
        self.num_reads = 0  # reads in progress
        self.num_bytes = 0


class _Link:
    """The socket to another worker, and the reader of its pages."""

    def __init__(self, socket: zmq.Socket[bytes], source: KVSource, transports: list[str]) -> None:
        """`transports`: those that both sides name, the best first."""
        self.socket = socket
        self.monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.source = source
        self.transports = transports  # the first one is used; those that do not reach the other worker are removed
        self.failed: list[str] = []  # those that have failed in use, and are removed, too
        self.reader: Reader | None = None
        self.reads: dict[int, _Receipt] = {}

    def close(self) -> None:
        """Close the socket, and its monitor's socket, because the context waits for both."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


class Place(NamedTuple):
    """What is needed to make links."""

    context: zmq.Context[zmq.Socket[bytes]]
    keys: ChannelKeys | None
    rank: int


class Receiver:
    """All methods except those of the thread run in the worker's main thread; none of them waits for another engine."""

    def __init__(self, kv: KVPool, transports: dict[str, Transport], place: Place) -> None:
        """`transports`: the best first."""
        self._kv = kv
        self._num_layers = sum(len(group.layers) for group in kv.groups)
        self._part_bytes = kv.blocks.shape[2] * kv.blocks.element_size()
        self._transports = transports
        self._place = place
        self._codec: Codec[ToReader] = Codec(ToReader)
        self._held: deque[tuple[int, ReceiveKV | StopReceivingKV]] = deque()  # each with the step that it waits for
        self._begun, self._ended = -1, -1  # the latest steps; these and `_held` are the main thread's own
        self._lock = threading.Lock()  # guards all fields below, and each write to the pool
        self._orders: deque[ReceiveKV | StopReceivingKV] = deque()
        self._receipts: dict[str, _Receipt] = {}
        self._links: dict[str, _Link] = {}  # by address; used by the thread, or under the lock while it waits
        self._done: deque[KVReceived] = deque()
        self._num_due = 0
        self._next_read = 0
        self._is_closed = False
        self._before_read = faults.point("worker.handover")
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-receiver", daemon=True)
        self._thread.start()

    # --- in the main thread -------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether there are answers to take, now or soon."""
        return self._num_due > 0

    def order(self, message: ReceiveKV | StopReceivingKV) -> None:
        """Begin or end a handover, as the scheduler has decided.

        The steps that a device still computes may use the pages for the sequence that had them before.
        """
        self._held.append((self._begun, message))
        self._num_due += isinstance(message, ReceiveKV)
        self._release()

    def begin_step(self, step_id: int) -> None:
        """Note that a step is about to be launched."""
        self._begun = step_id

    def end_step(self, step_id: int) -> None:
        """Note that a step has been computed."""
        self._ended = step_id
        self._release()

    def _release(self) -> None:
        while self._held and self._held[0][0] <= self._ended:
            with self._lock:
                self._orders.append(self._held.popleft()[1])
            self._wake()

    def take_done(self) -> list[KVReceived]:
        """Return the answers that have become ready."""
        done: list[KVReceived] = []
        while self._done:
            done.append(self._done.popleft())
        self._num_due -= len(done)
        return done

    def clear(self) -> None:
        """The scheduler starts afresh: after this, nothing is written for its earlier orders."""
        self._held.clear()
        self._begun = self._ended = -1
        with self._lock:
            self._orders.clear()
            self._receipts.clear()
            self._done.clear()
            self._num_due = 0
            for link in self._links.values():
                self._forget_reads(link)

    def close(self) -> None:
        """End the thread, and close the sockets."""
        with self._lock:
            self._is_closed = True
        self._wake()
        self._thread.join()
        for link in self._links.values():
            self._forget_reads(link)
            link.close()
        for transport in self._transports.values():
            transport.close()
        os.close(self._news)

    def _wake(self) -> None:
        os.eventfd_write(self._news, 1)

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            poller = zmq.Poller()
            poller.register(self._news, zmq.POLLIN)
            with self._lock:
                if self._is_closed:
                    return
                while self._orders:
                    self._begin(self._orders.popleft())
                links = list(self._links.values())
                polls = any(link.reads and link.reader is not None and link.reader.polls for link in links)
            for link in links:
                poller.register(link.socket, zmq.POLLIN)
                poller.register(link.monitor, zmq.POLLIN)
            ready = dict(poller.poll(_POLL_MS if polls else None))
            if self._news in ready:
                os.eventfd_read(self._news)
            for link in links:
                if link.socket in ready:
                    self._hear(link)
                if link.monitor in ready:
                    self._on_break(link)
                if link.reads and link.reader is not None and link.reader.polls:
                    with self._lock:
                        self._guarded(link, lambda: None)

    def _begin(self, message: ReceiveKV | StopReceivingKV) -> None:
        try:
            self._obey(message)
        except Exception as error:  # the thread must go on: others wait for its answers
            log.exception("KV handover failed unexpectedly")
            self._receipts.pop(message.handover_id, None)
            self._answer(message.handover_id, 0, f"{type(error).__name__}: {error}")

    def _obey(self, message: ReceiveKV | StopReceivingKV) -> None:
        if isinstance(message, StopReceivingKV):
            receipt = self._receipts.get(message.handover_id)
            if receipt is not None:
                self._end(receipt, "it is not wanted any more")
            return
        source = message.sources[self._place.rank]
        link = self._links.get(source.address)
        if link is None or link.source != source:
            link = self._links[source.address] = self._connect(source, link)
        receipt = self._receipts[message.handover_id] = _Receipt(message, link)
        self._send(link, FollowKV(message.handover_id))
        if not receipt.num_missing:
            self._end(receipt)

    def _connect(self, source: KVSource, before: _Link | None) -> _Link:
        if before is not None:
            self._give_up(before, "the other worker is another one now")
        place = self._place
        socket = sockets.dealer(place.context, source.address, "kv-reader", place.keys)
        return _Link(socket, source, [name for name in self._transports if name in source.transports])

    def _hear(self, link: _Link) -> None:
        while True:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                message = self._codec.decode(frames[0].bytes)
                with self._lock:
                    self._on_message(link, message, frames[1].buffer if len(frames) == 2 else memoryview(b""))
            except zmq.Again:
                return
            except (MalformedMessage, ValueError):
                continue

    def _on_message(self, link: _Link, message: KVPages | KVLayers | KVData, data: memoryview) -> None:
        match message:
            case KVPages():
                receipt = self._receipts.get(message.handover_id)
                if receipt is not None:
                    receipt.offers[message.number] = columns(message.pages), 0
            case KVLayers():
                self._guarded(link, partial(self._read, link, message))
            case KVData():
                self._guarded(link, partial(self._take, link, message, data))

    def _guarded(self, link: _Link, act: Callable[[], None]) -> None:
        """Call `act`, which uses a link's reader; if it fails, use another transport from the next handover on."""
        try:
            act()
            if link.reader is not None:
                for number in link.reader.take_done():
                    self._on_read(link, number)
        except TransportError as error:
            self._switch_off(link, str(error))
        except Exception as error:  # the thread must go on: others wait for its answers
            log.exception("KV transport failed unexpectedly")
            self._switch_off(link, f"{type(error).__name__}: {error}")

    def _take(self, link: _Link, message: KVData, data: memoryview) -> None:
        if link.reader is not None:
            link.reader.take(message.read_id, data)

    def _read(self, link: _Link, message: KVLayers) -> None:
        """Read layers of an offer that have become ready."""
        receipt = self._receipts.get(message.handover_id)
        if receipt is None or message.number not in receipt.offers:
            return
        theirs, first = receipt.offers[message.number]
        end = min(message.num_layers, self._num_layers)
        receipt.offers[message.number] = theirs, max(first, end)
        for number, group in enumerate(self._kv.groups):
            parts = parts_of(group, first, end)
            of_group = theirs[theirs[:, 0] == number]
            places = [receipt.places.get((number, index), -1) for index in of_group[:, 1].tolist()]
            ours = np.array(places, dtype=np.int32)
            wanted = ours >= 0
            if parts.start >= parts.stop or not wanted.any():
                continue
            self._before_read()
            reader = self._reader_of(link)
            self._next_read += 1
            link.reads[self._next_read] = receipt
            receipt.num_reads += 1
            count = int(wanted.sum())
            receipt.num_bytes += count * (parts.stop - parts.start) * self._part_bytes
            if parts.stop == group.num_parts:
                receipt.num_missing -= count
            reader.begin(Read(self._next_read, parts, of_group[wanted, 2], ours[wanted]))

    def _reader_of(self, link: _Link) -> Reader:
        while link.reader is None:
            if not link.transports:
                raise TransportError("the two sides have no transport in common")
            name = link.transports[0]
            try:
                link.reader = self._transports[name].reader(link.source, lambda message: self._send(link, message))
                log.info("KV link opened", transport=name, address=link.source.address)
            except TransportError as error:  # no failure: memory of another host, for example
                if len(link.transports) == 1:  # the last one is tried again
                    raise
                log.info("KV transport not usable", transport=name, address=link.source.address, reason=str(error))
                del link.transports[0]
        return link.reader

    def _on_read(self, link: _Link, number: int) -> None:
        receipt = link.reads.pop(number, None)
        if receipt is None:
            return
        receipt.num_reads -= 1
        if not receipt.num_reads and not receipt.num_missing and receipt.handover_id in self._receipts:
            self._end(receipt)

    # --- ends -----------------------------------------------------------------------------------

    def _end(self, receipt: _Receipt, error: str = "") -> None:
        """Answer. All reads for the receipt must have ended before."""
        link = receipt.link
        del self._receipts[receipt.handover_id]
        numbers = [number for number, each in link.reads.items() if each is receipt]
        for number in numbers:
            del link.reads[number]
        if link.reader is not None and not all(link.reader.stop(number) for number in numbers):
            self._close_reader(link)
        self._send(link, UnfollowKV(receipt.handover_id))
        self._answer(receipt.handover_id, receipt.num_bytes, error)

    def _answer(self, handover_id: str, num_bytes: int, error: str) -> None:
        failed = dict.fromkeys(name for link in self._links.values() for name in link.failed)
        self._done.append(KVReceived(handover_id, num_bytes, error, tuple(failed)))

    def _close_reader(self, link: _Link) -> None:
        others = {each.handover_id: each for each in link.reads.values()}
        self._forget_reads(link)
        for other in others.values():
            self._end(other, "its transfer was ended together with another one")

    def _forget_reads(self, link: _Link) -> None:
        link.reads.clear()
        if link.reader is not None:
            link.reader.close()
            link.reader = None

    def _switch_off(self, link: _Link, reason: str) -> None:
        name = next(iter(link.transports), "")
        log.error("KV transport failed", transport=name, address=link.source.address, reason=reason)
        if len(link.transports) > 1:  # the last one is tried again
            link.failed.append(link.transports.pop(0))
        self._break(link, f"{name or 'transport'}: {reason}")

    def _break(self, link: _Link, reason: str) -> None:
        self._forget_reads(link)
        for receipt in [each for each in self._receipts.values() if each.link is link]:
            self._end(receipt, reason)

    def _give_up(self, link: _Link, reason: str) -> None:
        """Close the link, so that the next handover uses a new connection."""
        self._break(link, reason)
        del self._links[link.source.address]
        link.close()

    def _on_break(self, link: _Link) -> None:
        while True:
            try:
                recv_monitor_message(link.monitor, zmq.NOBLOCK)
            except zmq.Again:
                break
        with self._lock:
            self._give_up(link, "the connection to the other worker broke")

    def _send(self, link: _Link, message: Message) -> None:
        try:
            link.socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("KV peer not reading", address=link.source.address)
