"""Workers that die on a machine whose other processes want all of it: what is not ready is not waited for."""

import asyncio
import contextlib
from pathlib import Path

import psutil
import pytest

from tests.e2e.servers import Server, serving
from tests.faults.clockwork import make_clockwork
from tests.faults.orders import Stream, busy
from tests.faults.soak import only_in_soak
from tests.faults.streams import client, spare_is_there

FLAGS = ("--served-model-name", "m", "--num-pages", "4096", "--spare-worker")


async def importing_spare(server: Server) -> psutil.Process:
    """The spare, as soon as it is there."""
    for _ in range(600):
        for child in psutil.Process(server.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "penstock.gpu_worker.startup.spare" in child.cmdline():
                    return child
        await asyncio.sleep(0.05)
    raise AssertionError("no spare is started")


@only_in_soak
@pytest.mark.parametrize("num_loops", [0, 2, 6])
async def test_a_worker_comes_back_whatever_its_spare_does(tmp_path: Path, num_loops: int) -> None:
    folder = make_clockwork(tmp_path / "m", step_seconds=0.01)
    async with serving(folder, *FLAGS) as server, client() as http:
        first = server.children()["penstock-worker-spare"]
        first.kill()
        await asyncio.to_thread(first.wait)
        server.children()["penstock-worker-0"].kill()  # a new process, as there is no spare; then another spare
        with busy(num_loops):
            spare = await importing_spare(server)
            running = asyncio.create_task(Stream(5, 200).run(http, server))
            await asyncio.sleep(0.3)
            server.children()["penstock-worker-0"].kill()
            found = await asyncio.wait_for(running, 120)
            assert found.is_whole
            print(f"{num_loops} loops, spare importing: gap {found.gap:.2f} s")
        await spare_is_there(server)
        assert spare.is_running()
        with busy(num_loops):
            running = asyncio.create_task(Stream(5, 600).run(http, server))
            for _ in range(8):
                await asyncio.sleep(1.0)
                server.children()["penstock-worker-0"].kill()
            found = await asyncio.wait_for(running, 120)
            assert found.is_whole
            print(f"{num_loops} loops, deaths in a row: gap {found.gap:.2f} s")
        assert spare.is_running()
        await server.settled(http, 60)
