"""A supervised process: replaced at once, whatever its spare does, and heard while it lives."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable

import psutil
import pytest

from penstock.core.config import Config, IpcOptions
from penstock.core.launch import child as child_module
from penstock.core.launch.child import Child
from penstock.core.launch.spare import Forked, adopt_orphans, reap_strangers

CONFIG = Config(ipc=IpcOptions(heartbeat_interval=0.05))


@pytest.fixture
async def child(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Child]:
    monkeypatch.setattr(child_module, "_SPARE_DELAY", 0.01)
    monkeypatch.setattr(child_module, "_FORK_SECONDS", 0.5)
    child = Child("fake", "tests.core.fake_child", CONFIG, spare="tests.core.fake_child.spare")
    yield child
    child.signal(signal.SIGKILL)
    await child.ended()
    await child.end_spare()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come")


async def restarted(child: Child) -> None:
    """Kill it and start it again."""
    assert child.process is not None
    first = child.process.pid
    child.signal(signal.SIGKILL)
    assert await child.ended() == -signal.SIGKILL
    await child.start()
    await asyncio.wait_for(child.is_ready.wait(), 20)
    assert child.process.pid != first


async def test_a_spare_that_imports_for_ever_is_not_waited_for(child: Child) -> None:
    await child.start()
    await until(lambda: child._spare is not None and child._spare.running.returncode is None)
    [spare] = child.pids - {child.process.pid if child.process else 0}
    for _ in range(2):
        await restarted(child)
    assert spare in child.pids
    assert psutil.pid_exists(spare)


async def test_a_spare_that_does_not_answer_is_given_up(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SPARE", "imported")
    await child.start()
    await child.is_ready.wait()  # a new process, for the spare has not answered
    await until(lambda: child._spare is not None and child._spare.imported.is_set())
    [spare] = child.pids - {child.process.pid if child.process else 0}
    psutil.Process(spare).suspend()
    await restarted(child)
    assert not psutil.pid_exists(spare)
    await until(lambda: len(child.pids) == 2)  # another one


async def test_who_is_silent_is_known_and_who_was_not_listened_to_is_not_silent(child: Child) -> None:
    await child.start()
    await child.is_ready.wait()
    await asyncio.sleep(0.2)
    assert child.silent_for(0.1) <= 0.1
    await asyncio.sleep(0.2)
    assert child.silent_for(0.1) <= 0.1
    child.signal(signal.SIGSTOP)
    await asyncio.sleep(0.2)
    before = child.silent_for(0.0)
    for i in range(1, 11):
        assert child.silent_for(1.0) == pytest.approx(before + i)
    child.signal(signal.SIGCONT)
    await until(lambda: child.silent_for(0.0) == 0.0)


async def test_an_adopted_process_is_waited_for_or_reaped(request: pytest.FixtureRequest) -> None:
    """Two that outlive their parent: one is somebody's, and tells its exit code; the other leaves nothing behind."""
    adopt_orphans()
    request.addfinalizer(lambda: adopt_orphans(enabled=False))
    script = "import os, time\nfor i in (3, 4):\n if not os.fork():\n  time.sleep(0.5); os._exit(i)\n"
    script += "print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)"
    process = await asyncio.create_subprocess_exec("python3", "-c", script, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    mine, strange = map(int, said.split())
    forked = Forked(mine)
    assert await asyncio.wait_for(forked.wait(), 10) == 3
    await until(lambda: psutil.Process(strange).status() == psutil.STATUS_ZOMBIE)
    reap_strangers({mine})
    assert not psutil.pid_exists(strange)
