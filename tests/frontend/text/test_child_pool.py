"""Helper processes that are killed, stopped, worn out or not to be had: no honest request is blamed for it."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.frontend.errors import Unavailable
from penstock.frontend.text import child_pool
from penstock.frontend.text.child_pool import ChildDiedError, ChildPool, ChildTooSlowError
from tests.frontend.http_client import chat
from tests.frontend.live_server import live_server

QUESTION: list[Any] = ["encode", ["Hello", ""], False]


def make_pool(*arguments: str, module: str = "penstock.frontend.text.child", max_processes: int = 1) -> ChildPool:
    return ChildPool(module, arguments, max_processes=max_processes, max_queued=100, max_answer_bytes=1 << 20)


@pytest.fixture
async def pool(checkpoint: Path) -> AsyncIterator[ChildPool]:
    pool = make_pool(str(checkpoint), "", "text")
    await pool.warm()
    yield pool
    await pool.close()


async def test_a_process_that_is_killed_is_not_the_questions_fault(pool: ChildPool) -> None:
    [first] = pool.process_ids
    asking = asyncio.create_task(pool.ask(QUESTION, 20))
    await asyncio.sleep(0)
    os.kill(first, signal.SIGKILL)
    assert (await asking)[1] == ""
    assert first not in pool.process_ids


async def test_a_process_that_is_stopped_is_not_the_questions_fault(pool: ChildPool) -> None:
    [first] = pool.process_ids
    os.kill(first, signal.SIGSTOP)
    assert (await pool.ask(QUESTION, 3))[1] == ""
    assert first not in pool.process_ids
    assert not psutil.pid_exists(first)


async def test_two_deaths_are_the_questions_fault(pool: ChildPool) -> None:
    with pytest.raises(ChildDiedError):
        await pool.ask(["no such question"], 20)
    assert (await pool.ask(QUESTION, 20))[1] == ""


async def test_stopped_again_and_again_is_nobodys_fault(pool: ChildPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process as soon as it is ready."""
    start = ChildPool._start

    async def started_and_stopped(pool: ChildPool) -> "child_pool._Child":
        child = await start(pool)
        os.kill(child.pid, signal.SIGSTOP)
        return child

    os.kill(pool.process_ids[0], signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(ChildPool, "_start", started_and_stopped)
        with pytest.raises(Unavailable, match="overloaded") as caught:
            await pool.ask(["encode", ["Hello " * 150_000, ""], False], 1)
    assert caught.value.retry_after == child_pool.RETRY_SECONDS
    assert (await pool.ask(QUESTION, 20))[1] == ""


LONG: list[Any] = ["encode", ["Hello " * 30_000, ""], False]
"""It takes the process some tenths of a second."""


@pytest.mark.parametrize(("share", "outcome"), [(0.1, Unavailable), (2.0, ChildTooSlowError)])
async def test_cpu_time_decides_and_a_busy_machine_is_status_503(
    pool: ChildPool, monkeypatch: pytest.MonkeyPatch, share: float, outcome: type[Exception]
) -> None:
    """As if the process got this share of a core."""
    began = time.monotonic()
    monkeypatch.setattr(
        "penstock.frontend.text.child_pool._Child.cpu_seconds", lambda _: share * (time.monotonic() - began)
    )
    with pytest.raises(outcome):
        await pool.ask(["encode", ["Hello " * 300_000, ""], False], 0.05)


async def test_a_slow_share_of_a_core_is_enough_within_the_patience(
    pool: ChildPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    seconds = await _seconds_of(pool)
    monkeypatch.setattr(
        "penstock.frontend.text.child_pool._Child.cpu_seconds", lambda _: 0.2 * (time.monotonic() - began)
    )
    monkeypatch.setattr(child_pool, "_PATIENCE", 50)
    assert (await pool.ask(LONG, seconds / 2))[1] == ""


async def _seconds_of(pool: ChildPool) -> float:
    began = time.monotonic()
    await pool.ask(LONG, 60)
    return time.monotonic() - began


async def test_the_tokenizer_is_read_before_the_process_is_ready(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    pool = make_pool(str(tmp_path), "", "text")
    assert "tokenizer" in await pool.warm()
    await pool.close()


async def test_stopped_before_it_is_ready_is_nobodys_fault(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create, before = asyncio.create_subprocess_exec, psutil.Process().children()

    async def created_and_stopped(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await create(*arguments, **options)
        process.send_signal(signal.SIGSTOP)
        return process

    pool = make_pool(str(checkpoint), "", "text")
    with monkeypatch.context() as patch:
        patch.setattr(child_pool, "MAX_START_SECONDS", 0.5)
        patch.setattr(asyncio, "create_subprocess_exec", created_and_stopped)
        with pytest.raises(Unavailable, match="cannot be started") as caught:
            await pool.ask(QUESTION, 20)
    assert caught.value.retry_after == child_pool.RETRY_SECONDS
    assert set(psutil.Process().children()) <= set(before)
    assert (await pool.ask(QUESTION, 20))[1] == ""
    await pool.close()


async def test_processes_that_do_not_start_are_nobodys_fault() -> None:
    pool = make_pool(module="tests.frontend.no_such_module")
    with pytest.raises(Unavailable):
        await pool.ask(QUESTION, 20)
    await pool.close()


@pytest.mark.parametrize(("limit", "value"), [("MAX_QUESTIONS", 5), ("MAX_GROWTH", -1)])
async def test_a_worn_process_is_replaced_without_a_pause(
    pool: ChildPool, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    [first] = pool.process_ids
    for _ in range(4):
        await pool.ask(QUESTION, 20)
    assert pool.process_ids == [first]
    monkeypatch.setattr(child_pool, limit, value)
    async with asyncio.timeout(60):
        while first in pool.process_ids or not pool.process_ids:
            assert (await pool.ask(QUESTION, 20))[1] == ""
    monkeypatch.undo()
    [second] = pool.process_ids
    assert (await pool.ask(QUESTION, 20))[1] == ""
    assert pool.process_ids == [second]
    async with asyncio.timeout(60):  # it is ended after the new one has taken its place
        while psutil.pid_exists(first):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def started(before: set[psutil.Process]) -> None:
    async with asyncio.timeout(60):
        while not set(psutil.Process().children()) - before:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("wait", [0.0, 0.05, 2.0])
@pytest.mark.parametrize("leaves", [False, True])
async def test_closing_ends_processes_that_start_or_work(checkpoint: Path, wait: float, leaves: bool) -> None:
    before = set(psutil.Process().children())
    pool = make_pool(str(checkpoint), "", "text", max_processes=2)
    long: list[Any] = ["encode", ["Hello " * 1_000_000, ""], False]
    asking = [asyncio.create_task(pool.ask(long, 60)) for _ in range(3)]
    await started(before)
    await asyncio.sleep(wait)
    if leaves:
        asking[0].cancel()
    await pool.close()
    assert set(psutil.Process().children()) <= before
    for each in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(each, Unavailable | asyncio.CancelledError)
    with pytest.raises(Unavailable):
        await pool.ask(QUESTION, 20)
    assert set(psutil.Process().children()) <= before


async def test_closing_ends_a_process_that_takes_another_ones_place(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(psutil.Process().children())
    pool = make_pool(str(checkpoint), "", "text")
    await pool.ask(QUESTION, 20)
    first = set(psutil.Process().children())
    monkeypatch.setattr(child_pool, "MAX_GROWTH", -1)
    await pool.ask(QUESTION, 20)
    await started(first)
    await pool.close()
    assert set(psutil.Process().children()) <= before


def test_no_chat_fails_when_helpers_are_killed(checkpoint: Path, sockets: Path) -> None:
    others = set(psutil.Process().children())
    with live_server(checkpoint, sockets) as live:
        assert chat(live).status == 200
        is_over = threading.Event()
        answers: list[int] = []

        def ask() -> None:
            while not is_over.is_set():
                answers.append(chat(live).status)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(6):
            children = set(psutil.Process().children()) - others
            helpers = [child for child in children if child.name() == "penstock-text"]
            if helpers:  # the oldest: to kill the one that is asked once more would be the request's fault
                min(helpers, key=lambda child: child.create_time()).kill()
            num_before, deadline = len(answers), time.monotonic() + 60
            while len(answers) < num_before + 8 and time.monotonic() < deadline:
                time.sleep(0.01)
        is_over.set()
        for thread in threads:
            thread.join()
        assert len(answers) >= 48
        assert set(answers) == {200}


async def test_long_questions_leave_a_process_to_short_ones(checkpoint: Path) -> None:
    pool = ChildPool(
        "penstock.frontend.text.child", (str(checkpoint), "", "text"),
        max_processes=2, max_queued=100, max_answer_bytes=1 << 20, max_short=1000,
    )  # fmt: skip
    try:
        assert (await pool.ask(QUESTION, 20, "a"))[1] == ""
        [first] = pool.process_ids
        long = [asyncio.create_task(pool.ask(LONG, 60, client)) for client in "abab"]
        while len(pool._running) < 2:  # noqa: ASYNC110  (nobody tells)
            await asyncio.sleep(0.01)
        for _ in range(20):
            assert (await pool.ask(QUESTION, 20, "a"))[1] == ""
            assert first in pool.process_ids, "the long ones have a process of their own"
        assert not all(task.done() for task in long)
        for task in long:
            task.cancel()
        await asyncio.wait(long)
    finally:
        await pool.close()


async def test_a_lost_process_is_replaced_in_the_turn_that_lost_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_pool, "_LEFT_SECONDS", 0.0)  # a quick machine would answer all the same
    pool = make_pool(str(checkpoint), "", "text", max_processes=2)
    try:
        await asyncio.gather(pool.ask(QUESTION, 20, "a"), pool.ask(QUESTION, 20, "b"))
        before = set(pool.process_ids)
        assert len(before) == 2
        with pytest.raises(ChildTooSlowError):
            await pool.ask(LONG, 0.0, "a")
        assert set(pool.process_ids) < before
        await pool._slots.all_free()
        assert len(pool.process_ids) == 2
        assert len(before & set(pool.process_ids)) == 1
    finally:
        await pool.close()
