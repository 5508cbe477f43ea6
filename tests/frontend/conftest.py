"""Fixtures: a checkpoint folder, a live server with a fake scheduler."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frontend.checkpoint_folder import write_checkpoint
from tests.frontend.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="pst-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shared_server(checkpoint: Path) -> Iterator[LiveServer]:
    with tempfile.TemporaryDirectory(prefix="pst-") as folder, live_server(checkpoint, Path(folder)) as live:
        yield live


@pytest.fixture
def live(shared_server: LiveServer) -> Iterator[LiveServer]:
    """The shared server; each test leaves it with nothing running."""
    shared_server.reset()
    yield shared_server
    shared_server.wait_until(lambda: len(shared_server.server.service.generations) == 0)
    shared_server.wait_until(lambda: shared_server.server.service.engine.num_live == 0)
    shared_server.wait_until(lambda: shared_server.scheduler.num_running == 0)
