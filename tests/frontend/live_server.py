"""A whole frontend with its fake scheduler, in an event loop of its own thread, on a real port."""

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from penstock.config import Config, FrontendOptions, IpcOptions, ModelOptions, SchedulerOptions
from penstock.config.listening import addresses, bind
from penstock.config.part_options import PartOptions
from penstock.frontend.http.server import Server
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.ipc.messages import AddRequest
from tests.frontend.checkpoint_folder import CHATML, VOCAB_SIZE, byte_level_tokenizer, write_checkpoint
from tests.frontend.fake_scheduler import FakeScheduler, Script, echo

T = TypeVar("T")


class LiveServer:
    """What tests see of it. `do` runs something in the server's loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, server: Server, scheduler: FakeScheduler, port: int, admin_port: int = 0
    ) -> None:
        self.loop = loop
        self.server = server
        self.scheduler = scheduler
        self.port = port
        self.admin_port = admin_port  # if the options name one, whichever: the system chooses both
        self._is_closed = False
        self.url = f"http://127.0.0.1:{port}"

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.server.service.model.tokenizer

    def do(self, function: Callable[[], T]) -> T:
        """Run `function` in the server's event loop and wait for it."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def says(self, text: str, **options: Any) -> None:
        """From now on the model answers with this text."""
        self.gives(self.tokenizer.encode(text, add_special_tokens=False), **options)

    def gives(self, token_ids: list[int], **options: Any) -> None:
        """From now on the model answers with these tokens."""
        self.plays(lambda request, sequence_idx: Script(token_ids, **options))

    def plays(self, script: Callable[[AddRequest, int], Script]) -> None:
        """From now on the model answers by this script."""
        self.scheduler.script = script

    def close(self) -> None:
        """Drain and close the server. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(20)

    def reset(self) -> None:
        """Back to the default script, and nothing received."""

        def work() -> None:
            self.scheduler.script = echo
            self.scheduler.received.clear()

        self.do(work)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait for something that another thread brings about."""
        deadline = time.monotonic() + seconds
        while not self.do(condition):
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)


@contextmanager
def live_server(
    folder: Path,
    sockets: Path,
    *,
    frontend: dict[str, Any] | None = None,
    heartbeat_timeout: float = 10.0,
    max_model_len: int = 512,
    is_ready: bool = True,
    takes_images: bool = False,
    names: tuple[str, ...] = ("test/model", "alias"),
    parts: Sequence[PartOptions] = (),
) -> Iterator[LiveServer]:
    """Start a server on a free port; on leaving, drain and stop it."""
    address = f"ipc://{sockets}/frontend.sock"
    config = Config(
        model=ModelOptions(model=str(folder), served_model_name=names),
        frontend=FrontendOptions(**{"port": 0, "shutdown_timeout": 1.0, **(frontend or {})}),
        ipc=IpcOptions(frontend_address=address, max_heartbeat_interval=0.1, heartbeat_timeout=heartbeat_timeout),
        scheduler=SchedulerOptions(max_num_queued_seqs=1000),
    ).with_options(*parts)
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> LiveServer:
        server = Server(config, "penstock-frontend-0")
        facts: dict[str, Any] = {"max_model_len": max_model_len, "is_ready": is_ready, "takes_images": takes_images}
        scheduler = FakeScheduler(address, vocab_size=VOCAB_SIZE, **facts)
        listeners = [bind("127.0.0.1", 0, is_shared=False) for _ in addresses(config.frontend)]
        await server.start(*listeners)
        if is_ready:
            await server.service.engine.wait_ready(5.0)
        return LiveServer(loop, server, scheduler, *(listener.getsockname()[1] for listener in listeners))

    live = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield live
    finally:
        live.close()
        live.do(live.scheduler.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        # uvloop's `close` waits for children for ever if another part of this process has taken their exit status.
        closing = threading.Thread(target=loop.close, daemon=True)
        closing.start()
        closing.join(10)


@contextmanager
def made_server(
    folder: Path, *, chat_template: Any = CHATML, special_tokens: Sequence[str] = (), **options: Any
) -> Iterator[LiveServer]:
    """A server of a checkpoint that is written for it, with this template and these special tokens."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([*special_tokens])
    write_checkpoint(folder, tokenizer=tokenizer, chat_template=chat_template)
    with tempfile.TemporaryDirectory(prefix="pst-") as sockets, live_server(folder, Path(sockets), **options) as live:
        yield live
