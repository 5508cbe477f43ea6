"""Traces of a running server's steps, asked for over HTTP."""

import asyncio
import json
import time
from pathlib import Path

import aiohttp

from tests.e2e.servers import serving
from tests.faults.clockwork import make_clockwork


def written(folder: Path, count: int) -> list[Path]:
    """The files of a folder, in the order in which they were asked for, once there are so many and none is empty."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        found = sorted(folder.glob("*.json"), key=lambda path: (len(path.name), path.name))
        if len(found) == count and all(path.stat().st_size for path in found):
            return found
        time.sleep(0.05)
    raise TimeoutError(f"there are {len(found)} traces")


async def test_a_running_server_records_steps(tmp_path: Path) -> None:
    folder, traces = make_clockwork(tmp_path / "clockwork", step_seconds=0.005), tmp_path / "traces"
    flags = ("--served-model-name", "m", "--num-pages", "64", "--cpu-kernels", "torch", "--profile", str(traces))
    body = {"model": "m", "prompt": [40, 41, 42], "max_tokens": 90, "ignore_eos": True}
    async with serving(folder, *flags) as server, aiohttp.ClientSession() as http:

        async def ask(path: str, **options: object) -> None:
            async with http.post(f"{server.url}{path}", **options) as response:  # type: ignore[arg-type]
                assert response.status == 200, await response.text()

        await ask("/v1/completions", json=body)  # the window that --profile itself records
        await ask("/start_profile?num_steps=7")
        await ask("/v1/completions", json=body)
        await ask("/start_profile")
        await ask("/v1/completions", json=body | {"max_tokens": 20})
        await ask("/stop_profile")
        found = await asyncio.to_thread(written, traces, 3)
    first, second, third = (json.loads(path.read_text())["traceEvents"] for path in found)
    steps = [
        sum(str(event.get("name")).startswith("ProfilerStep#") and "dur" in event for event in events)
        for events in (first, second, third)
    ]
    assert steps[:2] == [60, 7]
    assert 10 < steps[2] < 60
