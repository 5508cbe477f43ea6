"""A real server with a pool that is too small, and pages on the host: workers die while sequences are swapped out."""

from pathlib import Path

import aiohttp
import pytest

from penstock.ipc.faults import FAULTS, ONCE
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving
from tests.e2e.test_metrics import told
from tests.faults.soak import IS_SOAK, only_in_soak
from tests.faults.streams import all_told, bodies, check_equal, client, spare_is_there
from tests.internal_fields import internal

FLAGS = ("--served-model-name", "m", "--dtype", "float32", "--max-num-batched-tokens", "64", "--spare-worker")
TIGHT = ("--num-pages", "12", "--page-size", "16", "--host-kv-gib", "0.05")


async def host_tier(http: aiohttp.ClientSession, server: Server) -> dict[str, float]:
    found = await told(http, server)
    return {label: value for (name, label), value in found.items() if name.startswith("host_")}


@pytest.mark.parametrize("kind", ["swap", "auto", "recompute"] if IS_SOAK else ["swap"])
async def test_streams_say_the_same_whatever_is_swapped(checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    async with serving(checkpoint.folder, *FLAGS) as server, client() as http:
        expected = await all_told(http, server, bodies(16))
    faults = {FAULTS: "worker.step:kill@30,worker.result:kill@40", ONCE: str(tmp_path)}
    faults |= internal(preemption=kind)
    async with (
        serving(checkpoint.folder, *FLAGS, *TIGHT, **faults) as server,
        client() as http,
    ):
        await spare_is_there(server)
        check_equal(await all_told(http, server, bodies(16)), expected)
        assert sum(entry["event"] == "process exited, restarting" for entry in server.log) == 2
        check_equal(await all_told(http, server, bodies(16)), expected)
        await server.settled(http)
        found = await host_tier(http, server)
        assert found["held"] == 0
        assert found["free"] + found["cached"] > 0
        assert found["out"] >= found["in"]
        assert (found["out"] > 0) == (kind != "recompute")
        assert found["to_host"] > 0


@only_in_soak
async def test_a_server_goes_on_without_a_tier_that_cannot_be_had(checkpoint: Checkpoint) -> None:
    flags = (*FLAGS, "--host-kv-gib", "1000000")
    async with serving(checkpoint.folder, *flags, **internal(preemption="swap")) as server, client() as http:
        assert all(one.status == 200 for one in await all_told(http, server, bodies(4)))
        assert (await told(http, server))["kv_tier_failed", "host"] == 1
        assert not await host_tier(http, server)
        assert any(entry["event"] == "host tier not available" for entry in server.log)
