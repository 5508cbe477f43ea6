"""Processes that do nothing for a while: long work is left alone, a stopped process replaced."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.ipc.faults import FAULTS, ONCE
from tests.e2e.servers import Server, serving
from tests.faults.clockwork import expected_tokens, make_clockwork
from tests.faults.soak import only_in_soak, sized
from tests.faults.streams import client, spare_is_there, told

FLAGS = ("--served-model-name", "m", "--num-pages", "4096")


def body(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "return_token_ids": True}


async def test_a_long_legal_prefill_is_left_alone(tmp_path: Path) -> None:
    """Many times as long as a peer may be silent."""
    seconds, timeout = sized((5.0, "2"), (15.0, "2"))
    folder = make_clockwork(tmp_path / "m", token_seconds=seconds / 100)
    prompt = [5 + i % 50 for i in range(100)]
    flags = (*FLAGS, "--heartbeat-timeout", timeout)
    async with serving(folder, *flags) as server, client() as http:
        found = await told(http, server, body(prompt, 3))
        assert found.tokens == expected_tokens(prompt, 3)
        events = {entry["event"] for entry in server.log}
        assert not events & {
            "process exited, restarting",
            "process unresponsive, killing",
            "engine not ready",
            "frontend gone",
        }


@only_in_soak
async def test_a_worker_that_is_stopped_for_twenty_seconds(tmp_path: Path) -> None:
    folder = make_clockwork(tmp_path / "m", step_seconds=0.01)
    async with serving(folder, *FLAGS, "--spare-worker") as server, client() as http:
        prompts = [[5 + i] for i in range(32)]
        running = [asyncio.create_task(told(http, server, body(prompt, 400))) for prompt in prompts]
        await asyncio.sleep(1.0)
        worker = server.children()["penstock-worker-0"]
        worker.send_signal(signal.SIGSTOP)
        await server.logged("process unresponsive, killing")
        await asyncio.sleep(20)
        for prompt, task in zip(prompts, running, strict=True):
            found = await task
            assert found.tokens == expected_tokens(prompt, 400)
            print(f"gap {found.gap:.1f} s")
        assert not worker.is_running()


async def test_a_slow_scheduler_and_a_slow_frontend_lose_nothing(tmp_path: Path) -> None:
    folder = make_clockwork(tmp_path / "m", step_seconds=0.01)
    faults = "scheduler.tokens:delay=0.8@10,frontend.tokens:delay=0.8@20,worker.result:delay=0.8@30"
    async with serving(folder, *FLAGS, **{FAULTS: faults}) as server, client() as http:
        prompts = [[5 + i] for i in range(8)]
        found = await asyncio.gather(*(told(http, server, body(prompt, 50)) for prompt in prompts))
        for prompt, one in zip(prompts, found, strict=True):
            assert one.tokens == expected_tokens(prompt, 50)
            assert one.ends == ["length", "[DONE]"]
            assert one.gap >= 0.7


async def test_a_worker_that_dies_while_the_scheduler_is_busy(tmp_path: Path) -> None:
    """Its successor's hello is there before the scheduler misses it, by a plan that it cannot send."""
    folder = make_clockwork(tmp_path / "m", step_seconds=0.01)
    faults = {FAULTS: "scheduler.plan:delay=2.0@1"}
    async with serving(folder, *FLAGS, "--spare-worker", **faults) as server, client() as http:
        await spare_is_there(server)
        running = asyncio.create_task(told(http, server, body([5], 20)))
        await asyncio.sleep(0.5)
        server.children()["penstock-worker-0"].kill()
        found = await asyncio.wait_for(running, 60)
        assert found.tokens == expected_tokens([5], 20)


IMPATIENT = ("--heartbeat-timeout", "2")


async def streams_survive(server: Server, http: aiohttp.ClientSession, harm: Callable[[], None]) -> float:
    """Four streams during which `harm` is done are what they should be; the longest gap in them."""
    prompts = [[5 + i] for i in range(4)]
    running = [asyncio.create_task(told(http, server, body(prompt, 300))) for prompt in prompts]
    await asyncio.sleep(1.0)
    harm()
    found = await asyncio.wait_for(asyncio.gather(*running), 90)
    for prompt, one in zip(prompts, found, strict=True):
        assert one.tokens == expected_tokens(prompt, 300)
        assert one.ends == ["length", "[DONE]"]
    return max(one.gap for one in found)


async def test_processes_that_do_nothing_are_replaced(tmp_path: Path) -> None:
    """One after the other: each time the streams go on, and afterwards all is as before."""
    folder = make_clockwork(tmp_path / "m", step_seconds=0.01)
    faults = {FAULTS: "scheduler.plan:hang@150", ONCE: str(tmp_path)}
    async with serving(folder, *FLAGS, *IMPATIENT, **faults) as server, client() as http:

        async def a_scheduler_whose_loop_hangs() -> None:
            await streams_survive(server, http, lambda: None)

        async def a_scheduler_that_is_stopped() -> None:
            scheduler = server.children()["penstock-scheduler"]
            await streams_survive(server, http, lambda: scheduler.send_signal(signal.SIGSTOP))
            assert not scheduler.is_running()

        async def a_worker_that_the_new_scheduler_never_hears_of() -> None:
            def harm() -> None:
                children = server.children()
                children["penstock-worker-0"].send_signal(signal.SIGSTOP)
                children["penstock-scheduler"].kill()

            await streams_survive(server, http, harm)

        async def a_frontend_that_is_stopped() -> None:
            running = asyncio.create_task(told(http, server, body([5], 3000)))
            await asyncio.sleep(1.0)
            position = len(server.log)
            server.children()["penstock-frontend-0"].send_signal(signal.SIGSTOP)
            await server.logged("process unresponsive, killing", after=position)
            with pytest.raises(aiohttp.ClientError):
                await running
            await server.logged("listening", after=position)

        async def a_scheduler_that_dies_more_often_than_one_may_that_never_starts() -> None:
            for _ in range(7):
                server.children()["penstock-scheduler"].kill()
                assert (await told(http, server, body([6], 20))).tokens == expected_tokens([6], 20)

        silent = 0
        for replaced, is_silent in (
            (a_scheduler_whose_loop_hangs, True),
            (a_scheduler_that_is_stopped, True),
            (a_worker_that_the_new_scheduler_never_hears_of, False),
            (a_frontend_that_is_stopped, True),
            (a_scheduler_that_dies_more_often_than_one_may_that_never_starts, False),
        ):
            await replaced()
            found = sum(entry["event"] == "process unresponsive, killing" for entry in server.log)
            assert found >= silent + is_silent  # more, if the machine was too busy for a heartbeat
            silent = found
            await server.settled(http)
            assert (await told(http, server, body([6], 20))).tokens == expected_tokens([6], 20)
