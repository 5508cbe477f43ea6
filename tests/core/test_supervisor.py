"""What the supervisor does when something in it fails."""

import asyncio
import signal
from pathlib import Path

import pytest
import structlog

from penstock.core.config import Config, ModelOptions
from penstock.core.config.addresses import with_addresses
from penstock.core.launch import supervisor as supervisor_module
from penstock.core.launch.child import Child
from penstock.core.launch.supervisor import Supervisor
from tests.faults.clockwork import make_clockwork


@pytest.mark.parametrize("where", ["start", "_keep_running", "_watch"])
async def test_an_error_in_a_watcher_ends_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A process that cannot be started again, and what else may go wrong: better an end than a silent half-life."""
    num_starts = 0
    start = Child.start

    async def fail(*_: object) -> None:
        raise OSError("no more processes")

    async def start_once(child: Child) -> None:
        nonlocal num_starts
        num_starts += 1
        if num_starts > 3 and where == "start":
            raise OSError("no more processes")
        await start(child)

    monkeypatch.setattr(supervisor_module, "Child", _fake_child)
    monkeypatch.setattr(Child, "start", start_once)
    monkeypatch.setattr(supervisor_module, "adopt_orphans", lambda: None)
    if where != "start":
        monkeypatch.setattr(Supervisor, where, fail)
    config = with_addresses(Config(model=ModelOptions(model=str(make_clockwork(tmp_path / "m")))), tmp_path)
    supervisor = Supervisor(config)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(supervisor.run())
        if where == "start":
            await asyncio.sleep(1.0)
            for child in supervisor._engine:
                await asyncio.wait_for(child.is_ready.wait(), 20)
            assert supervisor._worker.process is not None
            supervisor._worker.signal(signal.SIGKILL)
        assert await asyncio.wait_for(running, 30) == 1
    assert "internal error, giving up" in {entry["event"] for entry in logs}


def _fake_child(name: str, module: str, config: Config, index: int = 0, **_: object) -> Child:
    return Child(name, "tests.core.fake_child", config, index)
