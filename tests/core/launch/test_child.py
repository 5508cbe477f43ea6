"""A supervised process: replaced at once, whatever its spare does, and heard while it lives."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import psutil
import pytest

from penstock.config import Config, IpcOptions
from penstock.core.launch import spare as spare_module
from penstock.core.launch.child import Child
from penstock.core.launch.spare import Forked, Owner, Spare, adopt_orphans, reap_strangers
from penstock.core.launch.start import spawn

CONFIG = Config(ipc=IpcOptions(max_heartbeat_interval=0.05))


@pytest.fixture
async def spare(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Spare]:
    monkeypatch.setattr(spare_module, "_DELAY", 0.01)
    monkeypatch.setattr(spare_module, "_FORK_SECONDS", 0.5)
    spare = Spare("tests.core.fake_child.spare", CONFIG)
    yield spare
    await spare.end()


@pytest.fixture
async def child(spare: Spare) -> AsyncIterator[Child]:
    child = Child("fake", "tests.core.fake_child", CONFIG, spare=spare)
    yield child
    child.signal(signal.SIGKILL)
    await child.ended()


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
    await asyncio.wait_for(child.is_ready.wait(), 60)
    assert child.process.pid != first


async def test_a_spare_that_imports_for_ever_is_not_waited_for(child: Child, spare: Spare) -> None:
    await child.start()
    await until(lambda: spare.is_there)
    [there] = spare.pids
    for _ in range(2):
        await restarted(child)
    assert spare.pids == {there}
    assert psutil.pid_exists(there)


async def test_a_spare_that_does_not_answer_is_given_up(
    child: Child, spare: Spare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SPARE", "imported")
    await child.start()
    await child.is_ready.wait()  # a new process, for the spare has not answered
    await until(lambda: spare.has_imported)
    [there] = spare.pids
    psutil.Process(there).suspend()
    await restarted(child)
    assert not psutil.pid_exists(there)
    await until(lambda: spare.is_there)  # another one


async def test_workers_share_one_spare(spare: Spare) -> None:
    """The first ones wait for it together; those that are started again do not."""
    children = [Child(f"fake-{i}", "tests.core.fake_child", CONFIG, spare=spare) for i in range(3)]
    await asyncio.gather(*(child.start() for child in children))
    await asyncio.gather(*(child.is_ready.wait() for child in children))
    await until(lambda: spare.is_there)
    assert len(spare.pids) == 1
    await restarted(children[1])
    assert len({pid for child in children for pid in child.pids}) == 3
    for child in children:
        child.signal(signal.SIGKILL)
        await child.ended()


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
    assert await asyncio.wait_for(forked.wait(), 60) == 3
    await until(lambda: psutil.Process(strange).status() == psutil.STATUS_ZOMBIE)
    reap_strangers([Started({mine})])
    assert not psutil.pid_exists(strange)


class Started:
    """Waits for these processes."""

    is_starting = False

    def __init__(self, pids: set[int]) -> None:
        self.pids = pids


class QuickSpare(Spare):
    """Forks a process that dies before anybody knows it, just when strangers are reaped."""

    owners: Sequence[Owner] = ()

    async def until_imported(self) -> None:
        pass

    async def fork(
        self, name: str, config: Config, arguments: Sequence[str], descriptor: int, started: "asyncio.Future[int]"
    ) -> Forked | None:
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], dict(os.environ))  # noqa: ASYNC221 (it takes no time)
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        reap_strangers(self.owners)
        started.set_result(pid)
        return Forked(await started)


async def test_a_worker_that_dies_before_it_is_known_is_waited_for() -> None:
    spare = QuickSpare("tests.core.fake_child.spare", CONFIG)
    child = Child("fake", "tests.core.fake_child", CONFIG, spare=spare)
    spare.owners = [child, spare]
    await child.start()
    assert await asyncio.wait_for(child.ended(), 60) == 7
    assert not child.is_starting


async def test_a_spare_is_no_stranger_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = Spare("tests.core.fake_child.spare", CONFIG)
    seen: list[bool] = []

    async def watched(*arguments: Any) -> asyncio.subprocess.Process:
        process = await spawn(*arguments)
        seen.append(spare.is_starting and process.pid not in spare.pids)
        return process

    monkeypatch.setattr(spare_module, "spawn", watched)
    await spare.until_imported()
    assert seen == [True]
    assert not spare.is_starting
    await spare.end()


async def test_a_spare_is_no_stranger_while_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = Spare("tests.core.fake_child.spare", CONFIG)
    seen: list[bool] = []

    async def watched(*arguments: Any) -> asyncio.subprocess.Process:
        process = await spawn(*arguments)
        wait = process.wait

        async def watched_wait() -> int:
            seen.append(process.pid in spare.pids)
            return await wait()

        monkeypatch.setattr(process, "wait", watched_wait)
        return process

    monkeypatch.setattr(spare_module, "spawn", watched)
    await spare.until_imported()
    seen.clear()
    await spare.end()
    assert seen == [True]
    assert not spare.pids
