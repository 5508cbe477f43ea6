"""Ranks of a group die while they hold parts of a model: the group starts again as one, and streams say the same."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from penstock.ipc.faults import FAULTS, ONCE
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving
from tests.faults.soak import only_in_soak
from tests.faults.streams import all_told, bodies, check_equal, client

FLAGS = ("--served-model-name", "m", "--dtype", "float32", "--spare-worker", "--max-num-batched-tokens", "64")
SPLIT = ("--tensor-parallel-size", "2")
RANKS = ("penstock-worker-0", "penstock-worker-1")


def num_deaths(server: Server) -> int:
    return sum(entry["event"] == "process exited, restarting" for entry in server.log)


async def until_all_are_new(server: Server, before: dict[str, int]) -> None:
    async with asyncio.timeout(60):
        while True:
            now = server.children()
            if all(name in now and now[name].pid != pid for name, pid in before.items()):
                return
            await asyncio.sleep(0.02)


async def test_ranks_die_in_steps_when_idle_and_while_the_group_forms(checkpoint: Checkpoint) -> None:
    wanted = bodies(16, 80)
    async with serving(checkpoint.folder, *FLAGS, *SPLIT) as server, client() as http:
        expected = await all_told(http, server, wanted)
        for victim in RANKS:
            before = {name: server.children()[name].pid for name in RANKS}
            num_seen, begun = 0, asyncio.Event()

            def on_event(begun: asyncio.Event = begun) -> None:
                nonlocal num_seen
                num_seen += 1
                if num_seen == 40:
                    begun.set()

            running = asyncio.create_task(all_told(http, server, wanted, on_event))
            await begun.wait()
            position = len(server.log)
            server.children()[victim].kill()
            died = time.monotonic()
            await server.logged("engine ready", after=position)
            print(f"{victim} died in a step: back after {time.monotonic() - died:.2f} s")
            check_equal(await running, expected)
            await until_all_are_new(server, before)
        await server.settled(http)
        server.children()[RANKS[1]].kill()  # idle
        await asyncio.sleep(0.15)
        for child in (RANKS[0], RANKS[1]):  # loading, or waiting for the other
            if child in server.children():
                server.children()[child].kill()
                break
        check_equal(await all_told(http, server, wanted), expected)
        await server.settled(http)
        assert num_deaths(server) in (3, 4), "one for each: the others are ended with it"


@only_in_soak
@pytest.mark.parametrize("call", [1, 3, 20])
@pytest.mark.parametrize("point", ["worker.step", "worker.computed", "worker.result"])
@pytest.mark.parametrize("split", [SPLIT, ("--pipeline-parallel-size", "2"), (*SPLIT, "--data-parallel-size", "2")])
async def test_each_point(
    checkpoint: Checkpoint, tmp_path: Path, split: tuple[str, ...], point: str, call: int
) -> None:
    """Whichever rank comes there first."""
    environment = {FAULTS: f"{point}:kill@{call}", ONCE: str(tmp_path)}
    async with serving(checkpoint.folder, *FLAGS, *split, **environment) as server, client() as http:
        found = await all_told(http, server, bodies(32))
        assert num_deaths(server) == 1
        check_equal(found, await all_told(http, server, bodies(32)))
        assert Counter(entry["event"] for entry in server.log)["giving up"] == 0
