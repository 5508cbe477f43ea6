"""What a decode engine makes of what prefill engines tell."""

import asyncio
from pathlib import Path

import zmq

from penstock.config import Config
from penstock.ipc.messages import EngineNotReady, EngineReady, HandoverReleased, KVSource, SayHello, SequenceDelta
from penstock.parts.handover.scheduler.prefill_links import PrefillLinks

OWN = KVSource("ours", ("zmq",), (), {})
THEIRS = KVSource("theirs", ("zmq",), (), {})
READY = EngineReady(4, "m", 1, 1, 1, 1, 1, kv_sources=(THEIRS,))


class Listener:
    def __init__(self) -> None:
        self.own: tuple[KVSource, ...] = (OWN,)
        self.num_changes = 0

    def own_pages(self) -> tuple[str, tuple[KVSource, ...]]:
        return "m", self.own

    def on_peers(self) -> None:
        self.num_changes += 1

    def on_computed(self, delta: SequenceDelta) -> None:
        raise AssertionError

    def on_released(self, message: HandoverReleased) -> None:
        raise AssertionError


def test_new_workers_of_ours_do_not_make_an_engine_ready_that_is_not(tmp_path: Path) -> None:
    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        listener, address = Listener(), f"ipc://{tmp_path}/prefill.sock"
        links = PrefillLinks(context, Config(), None, listener)
        links.connect([address])
        link = links._links[address]
        for news in (EngineNotReady("no worker is connected"), SayHello()):
            links.hear(link, READY)
            assert links.peers == {address: (THEIRS,)}
            listener.own = ()
            links.worker_changed()
            assert links.peers == {address: ()}, "another number of ranks"
            listener.own = (OWN,)
            links.worker_changed()
            assert links.peers == {address: (THEIRS,)}, "it is still ready"
            links.hear(link, news)
            links.worker_changed()
            assert links.peers == {address: ()}, "it has no worker now"
        links.close()
        context.term()

    asyncio.run(run())
