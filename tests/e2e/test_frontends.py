"""Several frontends behind one port are one server to those who watch it."""

import asyncio
from pathlib import Path

import aiohttp

from tests.e2e.servers import Server, serving
from tests.faults.clockwork import make_clockwork

NUM_REQUESTS = 24


async def ask(server: Server) -> None:
    """One request over a connection of its own, which any of the frontends may get."""
    body = {"model": "m", "prompt": [40, 41], "max_tokens": 3}
    async with aiohttp.ClientSession() as http, http.post(f"{server.url}/v1/completions", json=body) as response:
        assert response.status == 200


async def scrape(server: Server) -> dict[str, float]:
    async with aiohttp.ClientSession() as http:
        return await server.metrics(http)


async def check_counts(server: Server, num_requests: int) -> None:
    """Whoever answers counts all requests, a second after the last; nobody ever counts less than was told before."""
    last = 0.0
    async with asyncio.timeout(60):
        for _ in range(3):
            while True:
                found = (await scrape(server))["penstock_generation_tokens_total"]
                assert found >= last
                last = found
                if found == 3 * num_requests:
                    break
                await asyncio.sleep(0.1)
    for _ in range(16):
        found_now = await scrape(server)
        assert found_now["penstock_generation_tokens_total"] == 3 * num_requests
        assert found_now["penstock_e2e_request_latency_seconds_count"] == num_requests
        assert found_now["penstock_num_requests_in_frontend"] in (1, 2)  # this scrape, and perhaps the one before


async def test_each_scrape_tells_of_all_frontends(tmp_path: Path) -> None:
    folder, sockets = make_clockwork(tmp_path / "clockwork"), tmp_path / "run"
    flags = ("--num-frontends", "2", "--served-model-name", "m", "--runtime-dir", sockets, "--cpu-kernels", "torch")
    async with serving(folder, *flags) as server:
        for _ in range(NUM_REQUESTS):
            await ask(server)
        await check_counts(server, NUM_REQUESTS)
        # No file of metrics: a file system that is full harms none.
        assert all(path.is_socket() or path.name.startswith("responses.") for path in sockets.iterdir())
        for name in ("penstock-frontend-0", "penstock-frontend-1"):
            position = len(server.log)
            server.children()[name].kill()
            await server.logged("listening", after=position)
            await check_counts(server, NUM_REQUESTS)
