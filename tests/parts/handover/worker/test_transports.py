"""Transports of KV pages alone: every part of every page comes to its place, once, and nothing else changes."""

import ctypes
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
import zmq

from penstock.gpu_worker.devices.cpu import shared_zeros
from penstock.gpu_worker.devices.device import Lane
from penstock.ipc.codec import Codec, pack_int32, unpack_int32
from penstock.ipc.messages import EngineReady, KVSource, Message
from penstock.parts.handover.messages import KVData, KVReceived, OfferKV, ReadKV, ReceiveKV, StopReceivingKV, ToReader
from penstock.parts.handover.scheduler.prefill_links import unlike
from penstock.parts.handover.worker.offers import Offers
from penstock.parts.handover.worker.receiver import Place, Receiver
from penstock.parts.handover.worker.transports import nixl
from penstock.parts.handover.worker.transports.registry import NAMES, make_transport, make_transports
from penstock.parts.handover.worker.transports.transport import Pool, Read, Reader, Transport, TransportError

SHAPE = (6, 40, 512)


class FakeAgent:
    """NIXL's agent as its documentation has it, in one process: transfers are copies, and end when looked at."""

    known: ClassVar[dict[bytes, "FakeAgent"]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.known[name.encode()] = self
        self.registered: list[torch.Tensor] = []
        self.handles: dict[int, tuple[list[Any], list[Any], int]] = {}

    def register_memory(self, tensor: torch.Tensor) -> object:
        self.registered.append(tensor)
        return tensor

    def deregister_memory(self, registered: object) -> None:
        self.registered.clear()

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        assert metadata in self.known
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        assert name.encode() in self.known

    def get_xfer_descs(self, places: list[tuple[int, int, int]], mem_type: str) -> list[tuple[int, int, int]]:
        assert mem_type == "DRAM"
        return places

    def initialize_xfer(self, operation: str, local: list[Any], remote: list[Any], peer: str) -> int:
        assert operation == "READ"
        self.handles[len(self.handles)] = local, remote, 2
        return len(self.handles) - 1

    def transfer(self, handle: int) -> str:
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        local, remote, left = self.handles[handle]
        if left:
            self.handles[handle] = local, remote, left - 1
            return "PROC"
        for (to, size, _), (of, count, _) in zip(local, remote, strict=True):
            assert size == count
            ctypes.memmove(to, of, size)
        return "DONE"

    def release_xfer_handle(self, handle: int) -> None:
        pass


@pytest.fixture
def with_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    api = types.ModuleType("nixl._api")
    api.nixl_agent = FakeAgent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", types.ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)


def pool(filled: bool) -> Pool:
    blocks, name = shared_zeros(SHAPE, torch.bfloat16)
    if filled:
        blocks.copy_(torch.randn(SHAPE))
    return Pool(blocks, name)


def reader_of(name: str, ours: Pool, theirs: Pool) -> tuple[Reader, list[Transport], Callable[[Message], None]]:
    transports = [make_transport(name, each) for each in (ours, theirs)]
    place = transports[1].place()
    assert place is not None
    asked: list[ReadKV] = []

    def send(message: Message) -> None:
        assert isinstance(message, ReadKV)
        asked.append(message)

    reader = transports[0].reader(KVSource("", (name,), (), {name: place}), send)

    def answer(_: Message | None = None) -> None:
        while asked:
            message = asked.pop(0)
            pages = torch.tensor(list(unpack_int32(message.pages)))
            part = theirs.blocks[message.first_part : message.end_part].index_select(1, pages)
            reader.take(message.read_id, part.view(torch.uint8).flatten().numpy().data)

    return reader, transports, answer


@pytest.mark.parametrize("name", NAMES)
def test_pages_come_to_their_places(name: str, with_nixl: None) -> None:
    ours, theirs, rng = pool(filled=False), pool(filled=True), Random(1)
    reader, transports, answer = reader_of(name, ours, theirs)
    expected = torch.zeros(SHAPE, dtype=torch.bfloat16)
    done: set[int] = set()
    free = list(range(SHAPE[1]))
    rng.shuffle(free)
    for number in range(12):
        count = rng.randint(1, 3)
        first = rng.randrange(SHAPE[1] - count)
        of = list(range(first, first + count)) if rng.random() < 0.5 else rng.sample(range(SHAPE[1]), count)
        to, free = free[:count], free[count:]
        parts = slice(*sorted(rng.sample(range(SHAPE[0] + 1), 2)))
        expected[parts, to] = theirs.blocks[parts, of]
        reader.begin(Read(number, parts, np.array(of, np.int32), np.array(to, np.int32)))
    for _ in range(20):
        answer()  # type: ignore[call-arg]
        done.update(reader.take_done())
    assert done == set(range(12))
    assert torch.equal(ours.blocks, expected)
    reader.close()
    for transport in transports:
        transport.close()


def test_memory_that_is_gone_is_refused() -> None:
    ours, theirs = pool(filled=False), pool(filled=True)
    transport = make_transport("shared_memory", ours)
    pid, descriptor, title = theirs.shared.split("/")
    for name in (f"{pid}/{descriptor}/penstock-other", f"{pid}/99999/{title}", f"999999999/{descriptor}/{title}"):
        with pytest.raises(TransportError):
            transport.reader(KVSource("", (), (), {"shared_memory": f"{name}/6/40".encode()}), print)


def test_what_cannot_be_used_here_is_left_out_or_refused() -> None:
    on_gpu = Pool(torch.zeros(1, 1, 4), "")
    assert list(make_transports("auto", on_gpu)) == ["zmq"]
    with pytest.raises(TransportError, match="CPU"):
        make_transports("shared_memory", on_gpu)
    with pytest.raises(TransportError, match="pip install nixl"):
        make_transports("nixl", on_gpu)


def test_a_failed_nixl_transfer_is_an_error(with_nixl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pool(filled=False), pool(filled=True)
    reader, _, _ = reader_of("nixl", ours, theirs)
    monkeypatch.setattr(FakeAgent, "check_xfer_state", lambda self, handle: "ERR")
    pages = np.array([1], np.int32)
    reader.begin(Read(0, slice(0, 1), pages, pages))
    with pytest.raises(TransportError, match="ERR"):
        reader.take_done()
    assert nixl.Nixl is not None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pages": (("the type of KV", "bfloat16"),)}, "the type of KV is bfloat16 there, float32 here (rank 0)"),
        ({"transports": ("zmq",)}, "read by zmq, ours by shared_memory"),
    ],
)
def test_unlike_engines_refuse_each_other_with_both_values(change: dict[str, Any], says: str) -> None:
    own = KVSource("a", ("shared_memory",), (("the type of KV", "float32"),), {})
    values = {"address": "b", "transports": own.transports, "pages": own.pages, "places": {}} | change
    theirs = EngineReady(4, "m", 1, 1, 1, 1, 1, kv_sources=(KVSource(**values),))
    assert says in unlike("m", (own,), theirs)


def test_models_and_numbers_of_ranks_must_agree() -> None:
    own = KVSource("a", ("zmq",), (), {})
    assert "its model is n, ours m" in unlike("m", (own,), EngineReady(4, "n", 1, 1, 1, 1, 1, kv_sources=(own,)))
    assert "2 ranks, we have 1" in unlike("m", (own,), EngineReady(4, "m", 1, 1, 1, 1, 1, kv_sources=(own, own)))
    assert "--role" in unlike("m", (own,), EngineReady(4, "m", 1, 1, 1, 1, 1))
    assert unlike("m", (own,), EngineReady(4, "m", 1, 1, 1, 1, 1, kv_sources=(own,))) == ""


def test_a_read_that_is_stopped_writes_nothing_more_and_holds_up_no_other() -> None:
    ours, theirs = pool(filled=False), pool(filled=True)
    reader, _, answer = reader_of("zmq", ours, theirs)
    for number in range(8):  # more than are under way at a time
        pages = np.array([number], np.int32)
        reader.begin(Read(number, slice(0, 6), pages, pages))
    assert all(reader.stop(number) for number in range(5))
    answer()  # type: ignore[call-arg]
    assert reader.take_done() == [5, 6, 7]
    assert not ours.blocks[:, :5].any()
    assert torch.equal(ours.blocks[:, 5:8], theirs.blocks[:, 5:8])


def test_what_a_closed_reader_has_asked_for_is_not_taken_for_something_else() -> None:
    ours = pool(filled=False)
    transport = make_transport("zmq", ours)
    asked: list[Message] = []
    pages = np.array([1], np.int32)
    for _ in range(2):
        reader = transport.reader(KVSource("", ("zmq",), (), {}), asked.append)
        reader.begin(Read(0, slice(0, 1), pages, pages))
        if len(asked) == 1:
            reader.close()
    late, wanted = asked
    assert isinstance(late, ReadKV)
    assert isinstance(wanted, ReadKV)
    reader.take(late.read_id, memoryview(b"\xff" * 1024))
    assert not ours.blocks.any()
    reader.take(wanted.read_id, memoryview(b"\x01" * 1024))
    assert ours.blocks[0, 1].all()


class Joined:
    """The two ends of handovers in one process: what one worker offers, and what another one reads of it."""

    def __init__(self, folder: Path, lane: Lane | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.theirs, self.ours = (pool(filled)._replace(lane=lane) for filled in (True, False))
        address = f"ipc://{folder}/kv.sock"
        self.offers = Offers(self.theirs, 3, None, address, self.context, None)
        groups = [SimpleNamespace(layers=(0, 1, 2), num_parts=6, has_values=True)]
        kv: Any = SimpleNamespace(blocks=self.ours.blocks, groups=groups)
        self.receiver = Receiver(kv, {"zmq": make_transport("zmq", self.ours)}, Place(self.context, None, 0))
        self.source = KVSource(address, ("zmq",), (), {"zmq": b""})

    def receive(self, handover_id: str, page: int) -> None:
        self.receiver.order(ReceiveKV(handover_id, (self.source,), pack_int32([0, 0, page])))

    def offer(self, handover_id: str, page: int) -> None:
        self.offers.offer(OfferKV(handover_id, 1, pack_int32([0, 0, page])))
        self.offers.begin_step(1)
        self.offers.end_step(1)

    def answers(self, count: int) -> list[KVReceived]:
        found: list[KVReceived] = []
        deadline = monotonic() + 60
        while len(found) < count and monotonic() < deadline:
            found += self.receiver.take_done()
            sleep(0.001)
        return found

    def close(self) -> bool:
        """Return whether all ends."""
        self.receiver.close()
        self.offers.close()
        ended = threading.Thread(target=self.context.term, daemon=True)
        ended.start()
        ended.join(60)
        return not ended.is_alive()


def test_both_ends_meet_and_part(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    joined.receive("a", page=3)
    joined.offer("a", page=7)
    assert [each.error for each in joined.answers(1)] == [""]
    assert torch.equal(joined.ours.blocks[:, 3], joined.theirs.blocks[:, 7])
    joined.receive("b", page=4)
    joined.receiver.order(StopReceivingKV("b"))
    assert [each.error for each in joined.answers(1)] == ["it is not wanted any more"]
    assert joined.close(), "a socket is still open"


class BesideSteps:
    """A lane of its own. The work of steps would be in another one, and is never done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def run(self, work: Callable[[], None]) -> None:
        work()
        self.done.append("copied")

    def mark(self) -> Any:
        return SimpleNamespace(wait=lambda: self.done.append("waited"))


def test_copies_of_a_gpu_wait_for_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = BesideSteps()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("it would wait for the steps there"))
    joined = Joined(tmp_path, cast(Lane, lane))
    joined.receive("a", page=3)
    joined.offer("a", page=7)
    assert [each.error for each in joined.answers(1)] == [""]
    assert torch.equal(joined.ours.blocks[:, 3], joined.theirs.blocks[:, 7])
    assert lane.done == ["copied", "waited"] * (len(lane.done) // 2)
    assert len(lane.done) >= 4  # both ends copy
    assert joined.close()


def test_pages_are_not_written_to_while_earlier_steps_may_use_them(tmp_path: Path) -> None:
    """A device may still compute a step of the sequence that had these pages before."""
    joined = Joined(tmp_path)
    joined.offer("a", page=7)
    joined.receiver.begin_step(4)
    joined.receiver.begin_step(5)
    joined.receive("a", page=3)
    joined.receiver.end_step(4)
    sleep(0.05)
    assert joined.receiver.is_busy
    assert not joined.receiver.take_done()
    assert not joined.ours.blocks[:, 3].any()
    joined.receiver.end_step(5)
    assert [each.error for each in joined.answers(1)] == [""]
    assert torch.equal(joined.ours.blocks[:, 3], joined.theirs.blocks[:, 7])
    joined.receiver.begin_step(6)
    joined.receive("b", page=4)
    joined.receiver.clear()
    assert not joined.receiver.is_busy
    joined.receive("c", page=4)  # of the next scheduler, whose steps have numbers of their own
    joined.receiver.order(StopReceivingKV("c"))
    assert [each.handover_id for each in joined.answers(1)] == ["c"]
    assert joined.close()


def test_others_are_answered_after_one_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may have no memory for what a reader wants."""
    joined = Joined(tmp_path)
    answer, failed = Offers._answer, threading.Event()

    def fail_once(offers: Offers, reader: bytes, message: ReadKV) -> None:
        if not failed.is_set():
            failed.set()
            raise torch.OutOfMemoryError
        answer(offers, reader, message)

    monkeypatch.setattr(Offers, "_answer", fail_once)
    joined.receive("a", page=3)
    joined.offer("a", page=7)
    assert failed.wait(60)
    joined.receive("b", page=4)
    joined.offer("b", page=8)
    assert [(each.handover_id, each.error) for each in joined.answers(1)] == [("b", "")]
    joined.receiver.order(StopReceivingKV("a"))
    assert [each.handover_id for each in joined.answers(1)] == ["a"]
    assert joined.close()


def test_a_reader_may_be_earlier_than_the_scheduler(tmp_path: Path) -> None:
    """It asks over a socket of its own, so it may come before the new scheduler's first message."""
    joined = Joined(tmp_path)
    joined.receive("a", page=3)
    while not joined.offers._handovers:
        sleep(0.001)
    joined.offers.clear()
    joined.offer("a", page=7)
    assert [each.error for each in joined.answers(1)] == [""]
    joined.offer("b", page=8)
    joined.offers.clear()
    assert not joined.offers._handovers, "what was offered before is withdrawn"
    assert joined.close()


def test_invalid_bytes_from_a_worker_end_no_thread(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    reader = joined.context.socket(zmq.DEALER)
    reader.connect(joined.source.address)
    codec: Codec[Any] = Codec(ToReader)
    for message in (ReadKV(1, 0, 1, b"123"), KVData(1), ReadKV(2, 0, 1, pack_int32([1]))):
        reader.send(codec.encode(message))
    assert reader.poll(5000)
    answer = codec.decode(reader.recv_multipart()[0])
    assert answer == KVData(2)
    reader.close(linger=0)
    assert joined.close()


def test_a_connection_that_broke_is_given_up(tmp_path: Path) -> None:
    joined = Joined(tmp_path)
    joined.receive("a", page=3)
    joined.offer("a", page=7)
    joined.answers(1)
    joined.receive("b", page=4)
    while "b" not in joined.receiver._receipts:  # later it would ask for a new connection
        sleep(0.001)
    joined.offers.close()
    assert [each.error for each in joined.answers(1)] == ["the connection to the other worker broke"]
    assert not joined.receiver._links
    joined.offers = Offers(joined.theirs, 3, None, joined.source.address, joined.context, None)
    joined.receive("c", page=5)
    joined.offer("c", page=8)
    assert [each.error for each in joined.answers(1)] == [""]
    assert joined.close()
