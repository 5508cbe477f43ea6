"""Two engines behind one server: whatever becomes of one of them, all streams say what they would have said anyway."""

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from penstock.ipc.faults import FAULTS
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving
from tests.faults.clockwork import expected_tokens, make_clockwork
from tests.faults.streams import Told, all_told, bodies, check_equal, client, told

FLAGS = ("--served-model-name", "m", "--dtype", "float32", "--spare-worker", "--max-num-batched-tokens", "64")
MAX_GAP = 2.0
NUM_STREAMS, NUM_TOKENS = 24, 80

Act = Callable[[], Awaitable[object]]


async def engines(server: Server, http: aiohttp.ClientSession) -> dict[str, dict[str, object]]:
    async with http.get(f"{server.url}/engines") as response:
        return {each["id"]: each for each in (await response.json())["data"]}


async def until_both_are_ready(server: Server, http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while {each["state"] for each in (await engines(server, http)).values()} != {"ready"}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def until_nothing_is_left(server: Server, http: aiohttp.ClientSession) -> None:
    """On both engines: no row and no page in use, nothing that waits."""
    names = ("penstock_num_requests_running", "penstock_num_requests_waiting", "penstock_num_used_pages")
    async with asyncio.timeout(60):
        while True:
            await asyncio.sleep(0.3)
            async with http.get(f"{server.url}/metrics") as response:
                families = text_string_to_metric_families(await response.text())
            found = [sample for family in families for sample in family.samples if sample.name in names]
            if len(found) == 6 and not any(sample.value for sample in found):
                return


async def disturbed(server: Server, http: aiohttp.ClientSession, act: Act, num_events: int = 60) -> list[Told]:
    """All streams; something is done while they run."""
    num_seen, begun = 0, asyncio.Event()

    def on_event() -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == num_events:
            begun.set()

    running = asyncio.create_task(all_told(http, server, bodies(NUM_STREAMS, NUM_TOKENS), on_event))
    await begun.wait()
    await act()
    return await running


async def drain(server: Server, *arguments: str) -> None:
    """`penstock drain`."""
    command = [sys.executable, "-m", "penstock.cli", "drain", "--url", server.url, "--seconds", "30"]
    process = await asyncio.create_subprocess_exec(*command, *arguments)
    assert await process.wait() == 0


async def kill(server: Server, name: str) -> None:
    server.children()[name].kill()


def is_serving(server: Server) -> dict[str, psutil.Process]:
    return {name: each for name, each in server.children().items() if name.startswith(("penstock-sch", "penstock-wor"))}


async def test_streams_go_on_at_the_other_engine(checkpoint: Checkpoint) -> None:
    async with serving(checkpoint.folder, *FLAGS, "--data-parallel-size", "2") as server, client() as http:
        await until_both_are_ready(server, http)
        expected = await all_told(http, server, bodies(NUM_STREAMS, NUM_TOKENS))
        calm = max(one.gap for one in expected)

        async def check(what: str, act: Act) -> None:
            found = await disturbed(server, http, act)
            check_equal(found, expected)
            gap = max(one.gap for one in found)
            print(f"longest gap, {what}: {gap:.2f} s")
            assert gap < MAX_GAP + 20 * calm  # a busy machine has gaps without deaths, too
            await until_both_are_ready(server, http)
            await until_nothing_is_left(server, http)

        await check("a worker dies", lambda: kill(server, "penstock-worker-0-0"))
        await check("a scheduler dies", lambda: kill(server, "penstock-scheduler-1"))

        async def drain_and_undo() -> None:
            await drain(server, "0")
            async with http.get(f"{server.url}/health") as response:
                assert (await response.json())["engines"] == {"0": "drained", "1": "ready"}
            async with http.get(f"{server.url}/metrics") as response:
                assert 'penstock_engine_draining{engine="0"} 1.0' in await response.text()
            assert (await engines(server, http))["0"]["running"] == 0
            await drain(server, "0", "--undo")

        await check("an engine is drained", drain_and_undo)
        before = is_serving(server)
        await check("both are restarted, one after the other", lambda: drain(server, "--all", "--restart"))
        after = is_serving(server)
        assert before.keys() == after.keys()
        spare = "penstock-worker-spare"
        assert [name for name in before if before[name] == after[name]] == [spare], "and it forked the new workers"


POISON = 200


async def test_a_request_that_ends_workers_does_not_walk_through_all_engines(tmp_path: Path) -> None:
    """It ends one of the first engine, and then the second one's until it is found; the first one is left alone."""
    folder = make_clockwork(tmp_path / "m", step_seconds=0.01)
    flags = ("--served-model-name", "m", "--spare-worker", "--num-pages", "4096", "--data-parallel-size", "2")
    poison = {"model": "m", "temperature": 0, "prompt": [9, POISON, 7], "max_tokens": 20}
    async with serving(folder, *flags, **{FAULTS: f"worker.step:kill@token={POISON}"}) as server, client() as http:
        await until_both_are_ready(server, http)
        prompts = [[5 + i, 6, 7] for i in range(6)]
        others = [
            {"model": "m", "temperature": 0, "return_token_ids": True, "prompt": prompt, "max_tokens": 300}
            for prompt in prompts
        ]
        running = [asyncio.create_task(told(http, server, other)) for other in others]
        await asyncio.sleep(0.5)
        async with http.post(f"{server.url}/v1/completions", json=poison) as response:
            assert (await response.json())["error"]["code"] == "request_ends_workers"
        for prompt, task in zip(prompts, running, strict=True):
            found = await task
            assert (found.tokens, found.ends) == (expected_tokens(prompt, 300), ["length", "[DONE]"])
        deaths = Counter(entry["child"] for entry in server.log if entry["event"] == "process exited, restarting")
        assert min(deaths.values()) == 1
        assert sum(deaths.values()) <= 6
        await until_both_are_ready(server, http)
        await until_nothing_is_left(server, http)
        for _ in range(4):  # whichever engine it goes to: that one has been told
            async with http.post(f"{server.url}/v1/completions", json=poison) as response:
                assert (await response.json())["error"]["code"] == "request_ends_workers"
        again = Counter(entry["child"] for entry in server.log if entry["event"] == "process exited, restarting")
        assert again == deaths
