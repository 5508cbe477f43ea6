"""Links to several workers, over real sockets: each has a transport of its own, and its own failures."""

import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import torch
import zmq

from penstock.gpu_worker.devices.cpu import shared_zeros
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import KVSource, Message
from penstock.parts.handover.messages import KVReceived, OfferKV, ReceiveKV
from penstock.parts.handover.worker.offers import Offers
from penstock.parts.handover.worker.receiver import Place, Receiver
from penstock.parts.handover.worker.transports.registry import make_transport
from penstock.parts.handover.worker.transports.transport import Pool, Read, Reader, Transport, TransportError

SHAPE = (6, 40, 512)


def pool() -> Pool:
    blocks, name = shared_zeros(SHAPE, torch.bfloat16)
    return Pool(blocks, name)


class Peer:
    """What one other worker offers, and how it is reached."""

    def __init__(self, folder: Path, context: zmq.Context[zmq.Socket[bytes]], *, far: bool) -> None:
        self.pool = pool()
        self.pool.blocks.copy_(torch.randn(SHAPE))
        address = f"ipc://{folder}/{'far' if far else 'near'}.sock"
        self.offers = Offers(self.pool, 3, None, address, context, None)
        place = make_transport("shared_memory", self.pool).place()
        assert place is not None
        pid, rest = place.split(b"/", 1)
        places = {"shared_memory": (b"999999999" if far else pid) + b"/" + rest, "zmq": b""}  # no such process here
        self.source = KVSource(address, tuple(places), (), places)

    def offer(self, handover_id: str, page: int) -> None:
        self.offers.offer(OfferKV(handover_id, 1, pack_int32([0, 0, page])))
        self.offers.begin_step(1)
        self.offers.end_step(1)


class Links:
    """The two ends of handovers in one process: what two workers offer, one of them as if it were on another host, and
    what a third one reads of it."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.near, self.far = (Peer(folder, self.context, far=far) for far in (False, True))
        self.ours = pool()
        groups = [SimpleNamespace(layers=(0, 1, 2), num_parts=6, has_values=True)]
        kv: Any = SimpleNamespace(blocks=self.ours.blocks, groups=groups)
        self.transports = {name: Counted(make_transport(name, self.ours)) for name in ("shared_memory", "zmq")}
        self.receiver = Receiver(kv, {**self.transports}, Place(self.context, None, 0))

    def hand_over(self, peer: Peer, page: int) -> KVReceived:
        """One page, which must come unless the answer has an error."""
        handover_id = f"{peer.source.address}-{page}"
        self.receiver.order(ReceiveKV(handover_id, (peer.source,), pack_int32([0, 0, page])))
        peer.offer(handover_id, page=page + 1)
        deadline = monotonic() + 60
        while not (answers := self.receiver.take_done()) and monotonic() < deadline:
            sleep(0.001)
        (answer,) = answers
        assert answer.error or torch.equal(self.ours.blocks[:, page], peer.pool.blocks[:, page + 1])
        return answer

    def close(self) -> bool:
        """Return whether all ends."""
        self.receiver.close()
        for peer in (self.near, self.far):
            peer.offers.close()
        ended = threading.Thread(target=self.context.term, daemon=True)
        ended.start()
        ended.join(60)
        return not ended.is_alive()


class Counted:
    """A transport that remembers whom it reads; it fails in use, or reaches nobody, if told to."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.place, self.close = transport.place, transport.close
        self.reads: list[str] = []
        self.fails = False
        self.reaches = True

    def reader(self, source: KVSource, send: Callable[[Message], None]) -> Reader:
        if not self.reaches:
            raise TransportError("no way there")
        reader = self._transport.reader(source, send)
        begin = reader.begin

        def counted(read: Read) -> None:
            if self.fails:
                raise TransportError("told to")
            self.reads.append(source.address)
            begin(read)

        reader.begin = counted  # type: ignore[method-assign]
        return reader


def test_each_link_has_the_best_transport_that_reaches_the_other_worker(tmp_path: Path) -> None:
    """Another host's memory cannot be mapped: no handover fails for that, and neighbours' memory is still shared."""
    links = Links(tmp_path)
    answers = [links.hand_over(peer, page) for page, peer in enumerate([links.far, links.near] * 3)]
    assert [(each.error, each.failed_transports) for each in answers] == [("", ())] * 6
    assert links.transports["shared_memory"].reads == [links.near.source.address] * 3
    assert links.transports["zmq"].reads == [links.far.source.address] * 3
    assert links.close()


def test_a_transport_that_fails_is_switched_off_for_its_link_alone(tmp_path: Path) -> None:
    links = Links(tmp_path)
    near, far = links.near, links.far
    links.transports["shared_memory"].fails = True
    failed = links.hand_over(near, 1)
    assert "told to" in failed.error
    assert failed.failed_transports == ("shared_memory",)
    links.transports["shared_memory"].fails = False
    far.source.places["shared_memory"] = near.source.places["shared_memory"]  # as if it had come to this host
    far.pool.blocks.copy_(near.pool.blocks)
    assert [links.hand_over(peer, page).error for page, peer in enumerate((near, far, near), 2)] == [""] * 3
    assert links.transports["shared_memory"].reads == [far.source.address]
    assert links.transports["zmq"].reads == [near.source.address] * 2
    links.transports["zmq"].fails = True
    assert "told to" in links.hand_over(near, 6).error
    links.transports["zmq"].fails = False
    assert links.hand_over(near, 7).error == "", "the last transport is tried again"
    assert links.close()


def test_the_last_transport_is_tried_again_after_it_could_not_be_opened(tmp_path: Path) -> None:
    links = Links(tmp_path)
    for transport in links.transports.values():
        transport.reaches = False
    assert "zmq: no way there" in links.hand_over(links.near, 1).error
    for transport in links.transports.values():
        transport.reaches = True
    assert links.hand_over(links.near, 2).error == ""
    assert links.transports["zmq"].reads == [links.near.source.address]
    assert links.close()
