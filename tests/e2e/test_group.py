"""Two worker processes as one group, under a supervisor in a thread of this process: what the launch gives its ranks.

Nothing is split between ranks yet: each computes all, and rank 0 answers.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil

from penstock.core.config import Config, FrontendOptions, LogOptions, ModelOptions, WorkerOptions
from penstock.core.config.addresses import with_addresses
from penstock.core.launch.supervisor import Supervisor, reserve_ports
from tests.e2e.servers import stream
from tests.faults.clockwork import expected_text, make_clockwork

PROMPT = [40, 41, 42]


@contextmanager
def group_of_two(config: Config) -> Iterator[Supervisor]:
    """A launch in a thread, from ready to its end."""
    launched: list[Supervisor] = []
    loops: list[asyncio.AbstractEventLoop] = []
    is_ready = threading.Event()
    codes: list[int] = []

    async def run() -> int:
        supervisor = Supervisor(config, num_ranks=2)
        launched.append(supervisor)
        loops.append(asyncio.get_running_loop())
        running = asyncio.create_task(supervisor.run())
        await supervisor.frontends[0].is_ready.wait()
        is_ready.set()
        return await running

    thread = threading.Thread(target=lambda: codes.append(asyncio.run(run())))
    thread.start()
    try:
        assert is_ready.wait(60)
        yield launched[0]
    finally:
        loops[0].call_soon_threadsafe(launched[0].stop)
        thread.join(60)
    assert codes == [0]


async def test_a_stream_survives_the_death_of_a_rank(tmp_path: Path) -> None:
    config = Config(
        model=ModelOptions(model=str(make_clockwork(tmp_path / "m", step_seconds=0.01)), served_model_name=("m",)),
        frontend=FrontendOptions(port=0),
        worker=WorkerOptions(device="cpu", load_format="dummy", num_pages=100, num_threads=1, spare_worker=False),
        log=LogOptions(log_level="error"),
    )
    config, _ = reserve_ports(with_addresses(config, tmp_path))
    url = f"http://127.0.0.1:{config.frontend.port}/v1/completions"
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    with group_of_two(config) as supervisor:
        async with aiohttp.ClientSession() as http:
            text, victim = "", supervisor._workers[1].process
            assert victim is not None
            before = supervisor.pids
            async for event in stream(http, url, body):
                text += event["choices"][0]["text"] if event["choices"] else ""
                if len(text) == 50:
                    psutil.Process(victim.pid).kill()
            assert text == expected_text(PROMPT, 300)
            assert len(supervisor.pids - before) == 2, "both ranks are new"
    assert not any(psutil.pid_exists(pid) for pid in supervisor.pids)
