"""Processes die at chosen points of 32 streams' lives: each stream says what it would have said anyway."""

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

import aiohttp
import jsonschema
import pytest

from penstock.ipc.faults import FAULTS, ONCE
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import serving
from tests.faults.soak import only_in_soak
from tests.faults.streams import SCHEMA, Told, all_told, bodies, check_equal, client, spare_is_there

FLAGS = ("--served-model-name", "m", "--dtype", "float32", "--spare-worker", "--max-num-batched-tokens", "64")
MAX_GAP = 5.0


def longest_gap(found: list[Told], what: str) -> float:
    gap = max(one.gap for one in found)
    print(f"longest gap, {what}: {gap:.2f} s")
    return gap


async def run(checkpoint: Checkpoint, folder: Path, faults: str, num_deaths: dict[str, int], *flags: str) -> None:
    """The streams with faults, and once more without."""
    environment = {FAULTS: faults, ONCE: str(folder)}
    async with serving(checkpoint.folder, *FLAGS, *flags, **environment) as server, client() as http:
        await spare_is_there(server)
        found = await all_told(http, server, bodies(32))
        deaths = [entry for entry in server.log if entry["event"] == "process exited, restarting"]
        assert Counter(entry["child"] for entry in deaths) == num_deaths
        assert {entry["exit_code"] for entry in deaths} <= {-signal.SIGKILL, 1}
        expected = await all_told(http, server, bodies(32))
        check_equal(found, expected)
        assert "stop" in {one.ends[0] for one in expected[3::4]}  # at a stop string
        for one in expected[2::4]:
            jsonschema.validate(json.loads(one.text), SCHEMA)
        await server.settled(http)
        gap = longest_gap(found, faults)
        # Tests beside this one take their time too.
        assert gap <= MAX_GAP * (1 + len(deaths))


async def test_all_die_in_prefill_in_decode_and_with_tokens_untold(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """One after the other, in one run."""
    of_worker = "worker.step:kill@2,worker.computed:kill@15,worker.result:kill@12,worker.step:memory@8"
    of_scheduler = "scheduler.planned:kill@31,scheduler.tokens:kill@9"
    deaths = {"penstock-worker-0": 4, "penstock-scheduler": 2}
    await run(checkpoint, tmp_path, f"{of_worker},{of_scheduler}", deaths)


@only_in_soak
@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3"])
async def test_quantized_keys_and_values(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """What dies with a worker is quantized again, to the same codes."""
    faults, deaths = (
        "worker.computed:kill@15,scheduler.tokens:kill@9",
        {"penstock-worker-0": 1, "penstock-scheduler": 1},
    )
    flags = ("--kv-cache-dtype", name, "--cpu-kernels", "native")
    await run(checkpoint, tmp_path, faults, deaths, *flags)


@only_in_soak
@pytest.mark.parametrize("call", [1, 2, 3, 20, 50])
@pytest.mark.parametrize(
    "point",
    ["worker.step", "worker.computed", "worker.result", "scheduler.plan", "scheduler.planned", "scheduler.tokens"],
)
async def test_each_point(checkpoint: Checkpoint, tmp_path: Path, point: str, call: int) -> None:
    process = "penstock-worker-0" if point.startswith("worker") else "penstock-scheduler"
    await run(checkpoint, tmp_path, f"{point}:kill@{call}", {process: 1})


async def test_workers_die_idle_during_aborts_and_during_drain(checkpoint: Checkpoint) -> None:
    async with serving(checkpoint.folder, *FLAGS) as server, client() as http:
        await spare_is_there(server)
        wanted = bodies(8, 150)
        spare = server.children()["penstock-worker-spare"]
        server.children()["penstock-worker-0"].kill()  # idle
        expected = await all_told(http, server, wanted)
        assert server.children()["penstock-worker-spare"] == spare  # it forked the worker
        for process in (spare, server.children()["penstock-worker-0"]):
            assert process.nice() == os.getpriority(os.PRIO_PROCESS, 0)  # lower while it imported
        begun = asyncio.Event()
        doomed = [asyncio.create_task(all_told(http, server, [body], begun.set)) for body in bodies(8, 150)]
        running = asyncio.create_task(all_told(http, server, wanted))
        await begun.wait()
        for task in doomed:
            task.cancel()
        server.children()["penstock-worker-0"].kill()
        check_equal(await running, expected)
        await server.settled(http)
        begun.clear()
        running = asyncio.create_task(all_told(http, server, wanted, begun.set))
        await begun.wait()
        server.process.send_signal(signal.SIGTERM)
        position = len(server.log)
        await server.logged("draining", after=position - 1)
        server.children()["penstock-worker-0"].kill()
        check_equal(await running, expected)


async def test_a_frontend_that_dies_takes_its_streams_along_and_nothing_else(checkpoint: Checkpoint) -> None:
    async with serving(checkpoint.folder, *FLAGS, "--no-spare-worker") as server, client() as http:
        begun = asyncio.Event()
        running = [asyncio.create_task(all_told(http, server, [body], begun.set)) for body in bodies(16, 2000)]
        await begun.wait()
        children = server.children()
        position = len(server.log)
        children["penstock-frontend-0"].kill()
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ended, aiohttp.ClientError)
        gone = await server.logged("frontend gone", after=position)
        assert gone["aborted_requests"] > 0
        await server.logged("listening", after=position)
        await server.logged("engine ready", after=position)
        await server.settled(http)
        (again,) = await all_told(http, server, bodies(1))
        assert again.ends == ["length", "[DONE]"]
        assert server.children()["penstock-worker-0"] == children["penstock-worker-0"]
