"""Channels over real sockets: typed, bounded, and deaf to garbage."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq

from penstock.ipc import sockets
from penstock.ipc.addresses import AddressError, ipc_address, private_dir
from penstock.ipc.channel import Dealer, PeerId, Router, SyncDealer
from penstock.ipc.codec import Codec
from penstock.ipc.messages import (
    AbortRequest,
    EngineNotReady,
    FromFrontend,
    FromWorker,
    FrontendHello,
    Heartbeat,
    SamplingParams,
    StepPlan,
    StepResult,
    ToFrontend,
    ToWorker,
    Welcome,
)

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with private_dir() as folder:
        yield folder


class Inbox:
    """Collects what a router receives; `await inbox.wait(n)` for the n-th message."""

    def __init__(self) -> None:
        self.messages: list[tuple[PeerId, FromFrontend]] = []
        self._changed = asyncio.Event()

    def __call__(self, peer: PeerId, message: FromFrontend) -> None:
        self.messages.append((peer, message))
        self._changed.set()

    async def wait(self, count: int) -> list[FromFrontend]:
        async with asyncio.timeout(60):
            while len(self.messages) < count:
                self._changed.clear()
                await self._changed.wait()
        return [message for _, message in self.messages]


@contextlib.asynccontextmanager
async def pair(context: Context, address: str) -> AsyncIterator[tuple[Router[FromFrontend], Inbox]]:
    inbox = Inbox()
    router: Router[FromFrontend] = Router(context, address, Codec(FromFrontend), inbox)
    yield router, inbox
    router.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_messages_go_both_ways(context: Context, folder: Path, transport: str) -> None:
    address = ipc_address(folder, "f") if transport == "ipc" else "tcp://127.0.0.1:*"
    async with pair(context, address) as (router, inbox):
        answers: asyncio.Queue[ToFrontend] = asyncio.Queue()
        dealer: Dealer[ToFrontend] = Dealer(
            context, router.address, "frontend-0", Codec(ToFrontend), answers.put_nowait
        )
        hello = FrontendHello(1, "frontend-0", "abc")
        assert dealer.send(hello)
        assert await inbox.wait(1) == [hello]
        peer = inbox.messages[0][0]
        assert peer.startswith(b"frontend-0.")
        assert router.send(peer, EngineNotReady("starting"))
        assert await asyncio.wait_for(answers.get(), 60) == EngineNotReady("starting")
        dealer.close()
        dealer.close()


async def test_a_burst_arrives_whole_and_in_order(context: Context, folder: Path) -> None:
    async with pair(context, ipc_address(folder, "f")) as (router, inbox):
        dealer: Dealer[ToFrontend] = Dealer(context, router.address, "f", Codec(ToFrontend), lambda _: None)
        for i in range(3000):
            assert dealer.send(AbortRequest(f"r{i}"))
        received = await inbox.wait(3000)
        assert received == [AbortRequest(f"r{i}") for i in range(3000)]
        dealer.close()


async def test_sending_to_an_absent_peer_is_reported(context: Context, folder: Path) -> None:
    async with pair(context, ipc_address(folder, "f")) as (router, _):
        assert not router.send(b"nobody", Heartbeat())


async def test_garbage_is_counted_and_the_next_message_still_arrives(context: Context, folder: Path) -> None:
    async with pair(context, ipc_address(folder, "f")) as (router, inbox):
        raw = sockets.dealer(context, router.address, "stranger")
        raw.send(b"")
        raw.send(b"\xc1\xff")
        raw.send_multipart([b"two", b"frames"])
        raw.send(Codec[FromFrontend](FromFrontend).encode(StepResult(1, b"")))  # a message, but not for this channel
        raw.send(Codec[FromFrontend](FromFrontend).encode(Heartbeat()))
        assert await inbox.wait(1) == [Heartbeat()]
        assert router.num_dropped == 4
        raw.close()


async def test_an_oversized_message_cuts_the_peer_off_and_nobody_else(
    context: Context, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 1000)
    async with pair(context, ipc_address(folder, "f")) as (router, inbox):
        raw = sockets.dealer(context, router.address, "stranger")
        raw.send(b"x" * 2000)
        good: Dealer[ToFrontend] = Dealer(context, router.address, "good", Codec(ToFrontend), lambda _: None)
        good.send(Heartbeat())
        assert await inbox.wait(1) == [Heartbeat()]
        raw.close()
        good.close()


async def test_a_plain_loop_talks_to_an_event_loop(context: Context, folder: Path) -> None:
    results: asyncio.Queue[FromWorker] = asyncio.Queue()
    peers: list[PeerId] = []

    def on_message(peer: PeerId, message: FromWorker) -> None:
        peers.append(peer)
        results.put_nowait(message)

    router: Router[FromWorker] = Router(context, ipc_address(folder, "w"), Codec(FromWorker), on_message)

    def worker() -> None:
        channel: SyncDealer[ToWorker] = SyncDealer(context, router.address, "worker-0", Codec(ToWorker))
        assert channel.receive(0) is None
        channel.send(Heartbeat())
        assert isinstance(channel.receive(5000), Welcome)
        plan = channel.receive(5000)
        assert isinstance(plan, StepPlan)
        channel.send(StepResult(plan.step_id, b"\1\0\0\0"))
        channel.close()

    thread = threading.Thread(target=worker)
    thread.start()
    assert await asyncio.wait_for(results.get(), 60) == Heartbeat()
    assert router.send(peers[0], Welcome(1))
    assert router.send(peers[0], StepPlan(7, b"", b"", b"", b""))
    assert await asyncio.wait_for(results.get(), 60) == StepResult(7, b"\1\0\0\0")
    await asyncio.to_thread(thread.join)
    router.close()


def test_bounds_are_checked_on_receipt() -> None:
    codec: Codec[FromFrontend] = Codec(FromFrontend)
    frame = codec.encode(AbortRequest("x" * 1000))
    with pytest.raises(ValueError, match="256"):
        codec.decode(frame)
    assert SamplingParams(max_tokens=1).top_p == 1.0


def test_a_shared_runtime_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(AddressError, match="0700"), private_dir(str(tmp_path)):
        pass


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match="longer than"):
        ipc_address(tmp_path / ("x" * 120), "f")
