"""The descriptor of a socket tells of a change once: whoever may have used it up must look for messages."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
import zmq

from penstock.ipc import sockets
from penstock.ipc.addresses import ipc_address
from penstock.ipc.channel import Dealer, PeerId, Router
from penstock.ipc.codec import Codec
from penstock.ipc.messages import EngineNotReady, FromFrontend, FrontendHello, Heartbeat, ToFrontend

Context = zmq.Context[zmq.Socket[bytes]]
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
NewLoop = Callable[[], asyncio.AbstractEventLoop]

_TO_ROUTER: Codec[FromFrontend] = Codec(FromFrontend)
_TO_DEALER: Codec[ToFrontend] = Codec(ToFrontend)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come")


def keep_the_loop_busy() -> None:
    """Meanwhile the sockets' own threads bring what was sent."""
    time.sleep(0.3)


@LOOPS
def test_a_hello_that_came_before_a_send_which_failed(tmp_path: Path, new_loop: NewLoop) -> None:
    """A peer dies, its successor says hello while the loop is busy, and the next thing is a message to the dead one."""

    async def run(context: Context) -> None:
        heard: list[tuple[PeerId, FromFrontend]] = []
        router: Router[FromFrontend] = Router(
            context, ipc_address(tmp_path, "s"), Codec(FromFrontend), lambda *message: heard.append(message)
        )
        first = sockets.dealer(context, router.address, "first")
        first.send(_TO_ROUTER.encode(Heartbeat()))
        await until(lambda: len(heard) == 1)
        first.close()
        await asyncio.sleep(0.1)
        second = sockets.dealer(context, router.address, "second")
        second.send(_TO_ROUTER.encode(FrontendHello(1, "second", "m")))
        keep_the_loop_busy()
        assert not router.send(heard[0][0], Heartbeat())
        await until(lambda: len(heard) == 2)
        second.send(_TO_ROUTER.encode(Heartbeat()))
        await until(lambda: len(heard) == 3)
        router.close()
        second.close()

    _run(run, new_loop)


@LOOPS
def test_an_answer_that_came_before_a_send_for_which_there_was_no_room(
    tmp_path: Path, new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_QUEUED_MESSAGES", 1)

    async def run(context: Context) -> None:
        router = sockets.router(context, ipc_address(tmp_path, "s"))
        heard: list[ToFrontend] = []
        address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        dealer: Dealer[ToFrontend] = Dealer(context, address, "d", Codec(ToFrontend), heard.append)
        dealer.send(Heartbeat())
        peer, _ = await asyncio.to_thread(router.recv_multipart)
        await asyncio.sleep(0.1)
        num_refused = 0
        while num_refused < 5:  # until the pipe between the two is full as well
            is_sent = dealer.send(FrontendHello(1, "x" * 200, "m" * 200))
            num_refused = 0 if is_sent else num_refused + 1
            await asyncio.sleep(0 if is_sent else 0.02)
        router.send_multipart([peer, _TO_DEALER.encode(EngineNotReady("one"))])
        keep_the_loop_busy()
        assert not dealer.send(Heartbeat())
        await until(lambda: len(heard) == 1)
        dealer.close()
        router.close()

    _run(run, new_loop)


@LOOPS
def test_messages_behind_one_whose_callback_fails(tmp_path: Path, new_loop: NewLoop) -> None:
    async def run(context: Context) -> None:
        heard: list[FromFrontend] = []

        def on_message(_: PeerId, message: FromFrontend) -> None:
            heard.append(message)
            if len(heard) == 1:
                assert int(router._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN  # this, too, uses the change up
                raise RuntimeError("the first one")

        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: failures.append(about["exception"]))
        router: Router[FromFrontend] = Router(context, ipc_address(tmp_path, "s"), Codec(FromFrontend), on_message)
        peer = sockets.dealer(context, router.address, "peer")
        await asyncio.sleep(0.2)  # connected
        for _ in range(3):
            peer.send(_TO_ROUTER.encode(Heartbeat()))
        keep_the_loop_busy()
        await until(lambda: len(heard) == 3)
        assert len(failures) == 1
        router.close()
        peer.close()

    _run(run, new_loop)


def _run(test: Callable[[Context], object], new_loop: NewLoop) -> None:
    context: Context = zmq.Context()
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(test(context))  # type: ignore[arg-type]
    finally:
        context.destroy(linger=0)
