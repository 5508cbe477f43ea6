"""Processes die in the middle of streams: clients see a pause, and the tokens that they would have seen anyway."""

import asyncio
import signal
from typing import Any

import aiohttp

from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving, stream

FLAGS = ("--served-model-name", "m", "--dtype", "float32")
NUM_TOKENS = 200


def bodies(stops: dict[int, str]) -> list[dict[str, Any]]:
    """Sixteen streams: greedy, seeded, with stop strings and penalties, two sequences a request."""
    found: list[dict[str, Any]] = []
    for i in range(4):
        common = {"model": "m", "prompt": [5 + i, 6, 7, 8], "max_tokens": NUM_TOKENS, "ignore_eos": True}
        common |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        found += [
            common | {"temperature": 0, "logprobs": 1},
            common | {"temperature": 1, "seed": i, "top_p": 0.9},
            common | {"temperature": 0.8, "seed": i, "frequency_penalty": 0.3, "stop": ["never", stops[i]]},
            common | {"temperature": 0.7, "seed": i, "presence_penalty": 0.2, "n": 2, "min_tokens": 5},
        ]
    return found


async def told(
    http: aiohttp.ClientSession, server: Server, body: dict[str, Any], begun: asyncio.Event | None = None
) -> tuple[dict[int, Any], Any]:
    """All that a stream says, per choice and as a whole, without regard to how it was cut into events.

    `begun` is set after some of it.
    """
    choices: dict[int, Any] = {}
    usage = None
    async for event in stream(http, f"{server.url}/v1/completions", body):
        usage = event.get("usage") or usage
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "tokens": [], "logprobs": [], "ends": []})
            choice["text"] += part["text"]
            if begun is not None and len(choice["text"]) > 20:
                begun.set()
            choice["tokens"] += part.get("token_ids") or []
            choice["logprobs"] += (part.get("logprobs") or {}).get("tokens", [])
            choice["ends"] += [part["finish_reason"]] * bool(part["finish_reason"])
    return choices, usage and usage["completion_tokens"]


async def all_told(
    http: aiohttp.ClientSession, server: Server, stops: dict[int, str], begun: asyncio.Event | None = None
) -> list[tuple[dict[int, Any], Any]]:
    return list(await asyncio.gather(*(told(http, server, body, begun) for body in bodies(stops))))


async def late_stops(http: aiohttp.ClientSession, server: Server) -> dict[int, str]:
    """Stop strings that come late in the streams that have them."""
    found = bodies(dict.fromkeys(range(4), "never"))[2::4]
    texts = [choices[0]["text"] for choices, _ in await asyncio.gather(*(told(http, server, body) for body in found))]
    return {i: text[len(text) - 40 : len(text) - 30] for i, text in enumerate(texts)}


async def test_streams_go_on_after_the_scheduler_was_killed(checkpoint: Checkpoint) -> None:
    async with serving(checkpoint.folder, *FLAGS) as server, aiohttp.ClientSession() as http:
        stops = await late_stops(http, server)
        expected = await all_told(http, server, stops)
        ends = [choice["ends"] for choices, _ in expected for choice in choices.values()]
        assert ends.count(["length"]) == 16
        assert ends.count(["stop"]) == 4
        begun = asyncio.Event()
        running = asyncio.create_task(all_told(http, server, stops, begun))
        await begun.wait()
        assert not running.done()
        position = len(server.log)
        server.children()["penstock-scheduler"].kill()
        again = await server.logged("requests resubmitted", after=position)
        assert again["num_requests"] == 16
        assert await asyncio.wait_for(running, 60) == expected
        await server.settled(http)


async def test_streams_go_on_after_the_worker_was_stopped(checkpoint: Checkpoint) -> None:
    """SIGSTOP, and no SIGCONT ever: the process is there and does nothing."""
    body = bodies(dict.fromkeys(range(4), "never"))[1]
    async with (
        serving(checkpoint.folder, *FLAGS, "--heartbeat-timeout", "3") as server,
        aiohttp.ClientSession() as http,
    ):
        expected = await told(http, server, body)
        begun = asyncio.Event()
        running = asyncio.create_task(told(http, server, body, begun))
        await begun.wait()
        assert not running.done()
        position = len(server.log)
        worker = server.children()["penstock-worker-0"]
        worker.send_signal(signal.SIGSTOP)
        await server.logged("process unresponsive, killing", after=position)
        assert await asyncio.wait_for(running, 60) == expected
        assert not worker.is_running()
        await server.settled(http)
