"""Engines that several tests use, in a thread with an event loop of its own."""

import asyncio
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.gpu_worker.checkpoints import make_checkpoint
from tests.handover.engines import Engines, serving

T = TypeVar("T")


class Launch:
    """Engines in a thread."""

    def __init__(self, model: Path, engines: Engines, loop: asyncio.AbstractEventLoop) -> None:
        self.model = model
        self.engines = engines
        self._loop = loop

    def do(self, work: Callable[[Engines], Coroutine[Any, Any, T]], seconds: float = 120.0) -> T:
        """Run something in the engines' loop."""
        return asyncio.run_coroutine_threadsafe(work(self.engines), self._loop).result(seconds)


@contextmanager
def launched(model: Path, *roles: str, **options: Any) -> Iterator[Launch]:
    """Engines with these roles, ready."""
    ready: Future[Launch] = Future()

    async def serve(folder: Path) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with serving(model, folder, *roles, **options) as engines:
            launch = Launch(model, engines, loop)
            launch.stop = lambda: loop.call_soon_threadsafe(stop.set)  # type: ignore[attr-defined]
            ready.set_result(launch)
            await stop.wait()

    def run() -> None:
        with tempfile.TemporaryDirectory(prefix="pst-") as folder:
            try:
                asyncio.run(serve(Path(folder)))
            except BaseException as error:
                if not ready.done():
                    ready.set_exception(error)
                raise

    thread = threading.Thread(target=run)
    thread.start()
    launch = ready.result(180)
    try:
        yield launch
    finally:
        launch.stop()  # type: ignore[attr-defined]
        thread.join(60)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, "llama")
    return folder
