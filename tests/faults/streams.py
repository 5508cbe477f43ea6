"""Many streams at once, of all kinds, and what each of them said."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp

from tests.e2e.servers import Server

NUM_TOKENS = 40
SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[a-z]{6,9}$"},
    "minItems": 3,
    "maxItems": 3,
}


class Told(NamedTuple):
    """A stream from its first byte to its end."""

    status: int
    text: str
    tokens: list[int]
    ends: list[str]  # finish reasons, then "[DONE]" or the code of an error event
    num_tokens: int  # as usage says; -1 if it does not
    gap: float  # the longest wait between two events, in seconds


def bodies(num: int, num_tokens: int = NUM_TOKENS) -> list[dict[str, Any]]:
    """Greedy, seeded with samplers, constrained, with stop strings that come late: a quarter each."""
    found: list[dict[str, Any]] = []
    for i in range(num):
        body: dict[str, Any] = {"model": "m", "prompt": [3 + i % 90, 6, 7, 8 + i], "max_tokens": num_tokens}
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        match i % 4:
            case 0:
                body |= {"temperature": 0, "ignore_eos": True}
            case 1:
                body |= {"temperature": 1, "seed": i, "top_p": 0.9, "ignore_eos": True}
                if i % 8 == 1:
                    body |= {"dry_multiplier": 0.8, "dry_allowed_length": 1, "xtc_probability": 0.5, "typical_p": 0.9}
                else:
                    body |= {"mirostat": 1 + i // 8 % 2, "mirostat_tau": 4, "mirostat_eta": 0.8}
            case 2:
                body |= {"temperature": 1, "seed": i, "structured_outputs": {"json": SCHEMA}, "max_tokens": 200}
            case _:
                body |= {"temperature": 0.8, "seed": i, "ignore_eos": True, "min_tokens": num_tokens // 2}
                body |= {"stop": ["e", "t", "QQ", "a", "0"]}
        found.append(body)
    return found


async def told(
    http: aiohttp.ClientSession, server: Server, body: dict[str, Any], on_event: Callable[[], None] = lambda: None
) -> Told:
    """Stream one body to its end, whatever that is."""
    async with http.post(f"{server.url}/v1/completions", json=body | {"stream": True}) as response:
        if response.status != 200:
            return Told(response.status, "", [], [(await response.json())["error"]["code"]], -1, 0.0)
        text, tokens, ends, num_tokens, gap, last = "", list[int](), list[str](), -1, 0.0, 0.0
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            on_event()
            now = time.monotonic()
            last, gap = now, max(gap, now - last) if last else 0.0
            if line.startswith(b"data: [DONE]"):
                ends.append("[DONE]")
                continue
            event = json.loads(line[6:])
            if "error" in event:
                ends.append(event["error"]["code"])
                continue
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            for choice in event["choices"]:
                text += choice["text"]
                tokens += choice.get("token_ids") or []
                ends += [choice["finish_reason"]] * bool(choice["finish_reason"])
        return Told(200, text, tokens, ends, num_tokens, gap)


async def all_told(
    http: aiohttp.ClientSession,
    server: Server,
    wanted: Sequence[dict[str, Any]],
    on_event: Callable[[], None] = lambda: None,
) -> list[Told]:
    """All at once."""
    return list(await asyncio.gather(*(told(http, server, body, on_event) for body in wanted)))


def client() -> aiohttp.ClientSession:
    """A client for any number of streams at once."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300))


def check_equal(found: Sequence[Told], expected: Sequence[Told]) -> None:
    """The same texts, tokens, ends and counts; and all of them well ended."""
    for one, other in zip(found, expected, strict=True):
        assert one._replace(gap=0) == other._replace(gap=0)
        assert one.status == 200
        assert one.ends in (["length", "[DONE]"], ["stop", "[DONE]"])
        assert one.num_tokens == len(one.tokens)


async def spare_is_there(server: Server) -> None:
    """Wait for it: without one a replacement takes as long as a start."""
    for _ in range(300):
        if "penstock-worker-spare" in server.children():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("no spare worker")
