"""What the supervisor does when something in it fails; a group of workers; and a supervisor in somebody's thread."""

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import structlog

from penstock.config import Config, ModelOptions, ParallelOptions, WorkerOptions
from penstock.config.addresses import with_addresses
from penstock.config.ranks import Rank
from penstock.core.launch import engine as engine_module
from penstock.core.launch import launchers as launchers_module
from penstock.core.launch import supervisor as supervisor_module
from penstock.core.launch.child import Child
from penstock.core.launch.supervisor import Supervisor
from tests.core.launch.test_child import until
from tests.faults.clockwork import make_clockwork


@pytest.mark.parametrize("where", ["start", "_keep_engine", "_watch"])
async def test_an_error_in_a_watcher_ends_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A process that cannot be started again, and what else may go wrong: better an end than a silent half-life."""
    num_starts = 0
    start = Child.start

    async def fail(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    async def start_once(child: Child) -> None:
        nonlocal num_starts
        num_starts += 1
        if num_starts > 3 and where == "start":
            raise OSError("no more processes")
        await start(child)

    monkeypatch.setattr(supervisor_module, "Child", _fake_child)
    monkeypatch.setattr(engine_module, "Child", _fake_child)
    monkeypatch.setattr(launchers_module, "Child", _fake_child)
    monkeypatch.setattr(Child, "start", start_once)
    if where != "start":
        monkeypatch.setattr(Supervisor, where, fail)
    config = with_addresses(Config(model=ModelOptions(model=str(make_clockwork(tmp_path / "m")))), tmp_path)
    supervisor = Supervisor(config)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(supervisor.run())
        if where == "start":
            await asyncio.sleep(1.0)
            for child in supervisor.engines[0].children:
                await asyncio.wait_for(child.is_ready.wait(), 60)
            supervisor.engines[0].workers[0].signal(signal.SIGKILL)
        assert await asyncio.wait_for(running, 60) == 1
    assert "internal error, giving up" in {entry["event"] for entry in logs}


def _fake_child(name: str, module: str, config: Config, *arguments: str, **_: object) -> Child:
    return Child(name, "tests.core.fake_child", config, *arguments)


def fake_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_engines: int = 1) -> Supervisor:
    monkeypatch.setattr(supervisor_module, "Child", _fake_child)
    monkeypatch.setattr(engine_module, "Child", _fake_child)
    monkeypatch.setattr(launchers_module, "Child", _fake_child)
    config = Config(parallel=ParallelOptions(data_parallel_size=num_engines), worker=WorkerOptions(spare_worker=False))
    return Supervisor(with_addresses(config, tmp_path), num_ranks)


def pids(supervisor: Supervisor, engine: int = 0) -> list[int]:
    return [child.process.pid for child in supervisor.engines[engine].workers if child.process is not None]


async def until_all_are_ready(supervisor: Supervisor) -> None:
    async with asyncio.timeout(60):
        for child in supervisor.children:
            await child.is_ready.wait()


@pytest.mark.parametrize("dies", [0, 1])
async def test_a_group_of_workers_is_started_again_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: int
) -> None:
    supervisor = fake_launch(tmp_path, monkeypatch, 2)
    assert [child.name for child in supervisor.engines[0].workers] == ["penstock-worker-0", "penstock-worker-1"]
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0)
    await until_all_are_ready(supervisor)
    first = pids(supervisor)
    scheduler = supervisor.engines[0].scheduler.pids
    supervisor.engines[0].kill_hung(first[dies])
    await until(lambda: not set(first) & set(pids(supervisor)))
    await until_all_are_ready(supervisor)
    assert supervisor.engines[0].scheduler.pids == scheduler
    supervisor.stop()
    assert await asyncio.wait_for(running, 60) == 0
    assert not any(psutil.pid_exists(pid) for pid in (*first, *pids(supervisor)))


def _wait_for_death(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)


async def test_a_worker_that_was_killed_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler may notice its death before its parent does."""
    supervisor = fake_launch(tmp_path, monkeypatch, 1)
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0)
    await until_all_are_ready(supervisor)
    [pid] = pids(supervisor)
    with structlog.testing.capture_logs() as told:
        os.kill(pid, signal.SIGKILL)
        _wait_for_death(pid)  # the event loop does nothing meanwhile
        supervisor.engines[0].kill_hung(pid)
        await until(lambda: pid not in pids(supervisor))
        await until_all_are_ready(supervisor)
        [hanging] = pids(supervisor)
        supervisor.engines[0].kill_hung(hanging)
        await until(lambda: hanging not in pids(supervisor))
    died = {"event": "process exited, restarting", "exit_code": -9, "signal": "SIGKILL"}
    seen = [
        entry for entry in told if entry["event"] in ("process unresponsive, killing", "process exited, restarting")
    ]
    assert [entry["event"] for entry in seen] == [died["event"], "process unresponsive, killing", died["event"]]
    assert seen[0].items() >= died.items()
    supervisor.stop()
    assert await asyncio.wait_for(running, 60) == 0


async def test_a_rank_that_refuses_its_configuration_ends_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_REFUSAL", "1")
    supervisor = fake_launch(tmp_path, monkeypatch, 2)
    assert await asyncio.wait_for(supervisor.run(), 60) == 2


def test_a_supervisor_runs_in_a_thread_of_somebody_else_s_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no signals, and no children that are not its own."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    own = os.posix_spawn("/bin/sleep", ["sleep", "0.2"], dict(os.environ))
    codes: list[int] = []
    launch: list[tuple[Supervisor, asyncio.AbstractEventLoop]] = []
    is_ready = threading.Event()

    async def run() -> int:
        supervisor = fake_launch(tmp_path, monkeypatch, 1)
        launch.append((supervisor, asyncio.get_running_loop()))
        running = asyncio.create_task(supervisor.run())
        await asyncio.sleep(0)
        await until_all_are_ready(supervisor)
        is_ready.set()
        return await running

    thread = threading.Thread(target=lambda: codes.append(asyncio.run(run())))
    thread.start()
    assert is_ready.wait(60)
    [(supervisor, loop)] = launch
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == handlers
    loop.call_soon_threadsafe(supervisor.stop)
    thread.join(60)
    assert codes == [0]
    assert os.waitpid(own, 0)[1] == 0


def test_each_rank_has_its_gpu_and_its_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    ranks = [Rank(number, 2) for number in range(2)]
    shares = [rank.share(Config()).worker for rank in ranks]
    assert [(worker.device, worker.num_threads) for worker in shares] == [("auto:0", 4), ("auto:1", 4)]
    given = Config(worker=WorkerOptions(device="cpu", num_threads=3))
    assert all(rank.share(given) == given for rank in ranks)
    assert Rank().share(Config()) == Config(), "alone it has all"
    assert all(Rank.of(list(rank.arguments)) == rank for rank in ranks)
    assert Rank.of([]) == Rank()
