"""What /metrics tells after a known load, with a model whose steps last as long as they are told to."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.servers import Server, serving
from tests.faults.clockwork import make_clockwork

STEP = 0.05  # seconds
NUM_TOKENS = 20


async def complete(http: aiohttp.ClientSession, server: Server, num_tokens: int = NUM_TOKENS) -> None:
    body: dict[str, Any] = {"model": "m", "prompt": [40, 41, 42], "max_tokens": num_tokens, "ignore_eos": True}
    async with http.post(f"{server.url}/v1/completions", json=body) as response:
        assert response.status == 200


async def told(http: aiohttp.ClientSession, server: Server) -> dict[tuple[str, str], float]:
    """All samples by name and the value of their only label, if they have one."""
    async with http.get(f"{server.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return {
        (s.name.removeprefix("penstock_"), "".join(s.labels.values())): s.value for f in families for s in f.samples
    }


async def test_times_and_reasons_after_a_known_load(tmp_path: Path) -> None:
    """One row, two requests: the second waits for the first one's whole time."""
    folder = make_clockwork(tmp_path / "clockwork", step_seconds=STEP)
    flags = ("--served-model-name", "m", "--max-num-seqs", "1", "--num-pages", "64", "--cpu-kernels", "torch")
    async with serving(folder, *flags) as server, aiohttp.ClientSession() as http:
        both = [asyncio.create_task(complete(http, server)) for _ in range(2)]
        async with asyncio.timeout(60):
            while (found := await told(http, server)).get(("num_requests_waiting_by_reason", "no free row"), 0) < 1:
                assert not all(task.done() for task in both), "nobody was seen to wait"
                await asyncio.sleep(0.05)
        assert found["num_requests_waiting", ""] == 1
        assert 0 < found["kv_page_waste_perc", ""] < 1  # a page of 16 tokens, some of them not there yet
        await asyncio.gather(*both)
        await server.settled(http)
        found = await told(http, server)
        whole = NUM_TOKENS * STEP
        for name in ("queue_time", "prefill_time", "decode_time", "time_per_output_token"):
            assert found[f"request_{name}_seconds_count", ""] == 2, name
        # Lower bounds hold on any machine; the upper ones only say that the right thing is measured.
        assert 0.3 * whole < found["request_queue_time_seconds_sum", ""] < 30 * whole  # the second's alone
        assert (
            2 * STEP * 0.9
            < found["request_prefill_time_seconds_sum", ""]
            < found["e2e_request_latency_seconds_sum", ""]
        )
        decode = found["request_decode_time_seconds_sum", ""]
        assert 2 * (whole - STEP) * 0.9 < decode
        assert found["request_time_per_output_token_seconds_sum", ""] == pytest.approx(decode / (NUM_TOKENS - 1))
        assert ("num_requests_waiting_by_reason", "no free row") not in found
        assert found["kv_page_waste_perc", ""] == 0
        assert found["engine_dropped_tokens_total", ""] == 0  # both ended by their length, which is foreseen
        worker = server.children()["penstock-worker-0"].memory_info().rss
        assert found["device_memory_used_bytes", ""] == pytest.approx(worker, rel=0.5)
        assert found["device_memory_total_bytes", ""] == psutil.virtual_memory().total


async def test_tokens_that_overlap_wastes_are_counted(tmp_path: Path) -> None:
    """A sequence that ends by a stop token has one more under way."""
    folder = make_clockwork(tmp_path / "clockwork", step_seconds=0.01)
    flags = ("--served-model-name", "m", "--cpu-kernels", "torch")
    async with serving(folder, *flags) as server, aiohttp.ClientSession() as http:
        body: dict[str, Any] = {"model": "m", "prompt": [40, 41], "max_tokens": 9, "return_token_ids": True}
        async with http.post(f"{server.url}/v1/completions", json=body | {"ignore_eos": True}) as response:
            third = (await response.json())["choices"][0]["token_ids"][2]
        body |= {"stop_token_ids": [third]}
        async with http.post(f"{server.url}/v1/completions", json=body) as response:
            choice = (await response.json())["choices"][0]
        assert choice["finish_reason"] == "stop"
        await server.settled(http)
        assert (await told(http, server))["engine_dropped_tokens_total", ""] == 1
