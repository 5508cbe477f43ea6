"""What workers make beside their steps, or guess, ends them or fails: real processes, whose fault points say when.

A request with an image or a grammar that ends workers fails at the second death, alone, however many images of it come
before and however many engines there are; the streams beside it say what they would have said anyway.
"""

import asyncio
import json
from typing import Any

import aiohttp

from penstock.ipc.faults import FAULTS
from tests.e2e.servers import Server, serving
from tests.e2e.test_images import URLS, Seeing, messages, seeing
from tests.faults.streams import Told, client, told
from tests.faults.test_engines import until_both_are_ready
from tests.faults.test_poison import num_deaths

__all__ = ["seeing"]

FLAGS = ("--served-model-name", "m", "--dtype", "float32", "--spare-worker")
ENDS = "worker.encode:kill@embeddings=8"  # those of the second picture
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NUM_TOKENS = 120


def neighbour(i: int) -> dict[str, Any]:
    """A stream of text, whose prompt repeats itself, so that there are drafts."""
    chosen = {"temperature": 0} if i % 2 else {"temperature": 0.8, "seed": i}
    return {"model": "m", "prompt": [5 + i, 6, 7] * 4, "max_tokens": NUM_TOKENS, "ignore_eos": True} | chosen


async def tell_all(http: aiohttp.ClientSession, server: Server, begun: asyncio.Event | None = None) -> list[Told]:
    """All neighbours' streams."""
    on_event = (lambda: None) if begun is None else begun.set
    bodies = [neighbour(i) | {"return_token_ids": True} for i in range(6)]
    return await asyncio.gather(*(told(http, server, body, on_event) for body in bodies))


def check_same(found: list[Told], expected: list[Told]) -> None:
    for each, other in zip(found, expected, strict=True):
        assert (each.tokens, each.text, each.ends) == (other.tokens, other.text, ["length", "[DONE]"])


async def code_of(http: aiohttp.ClientSession, server: Server, **body: Any) -> str:
    """The code of the error that a request ends with; empty if it is answered."""
    body = {"model": "m", "temperature": 0, "max_tokens": 8} | body
    async with http.post(f"{server.url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
        return str(answer["error"]["code"]) if "error" in answer else ""


async def deaths_beside(
    http: aiohttp.ClientSession, server: Server, expected: list[Told], **body: Any
) -> tuple[str, int]:
    """Send a request while the neighbours' streams run; return the code that it ends with, and how many died of it."""
    before, begun = num_deaths(server), asyncio.Event()
    running = asyncio.create_task(tell_all(http, server, begun))
    await begun.wait()
    code = await code_of(http, server, **body)
    check_same(await running, expected)
    await server.settled(http)  # the supervisor may tell of a death later than the client hears of it
    return code, num_deaths(server) - before


async def test_what_ends_workers_is_found_at_the_second_death(seeing: Seeing) -> None:
    """One server: an image behind another new one, then a grammar. Drafters fail meanwhile, and end nobody."""
    faults = f"{ENDS},worker.grammar:kill,worker.draft:raise"
    drafts = ("--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 3}))
    async with serving(seeing.folder, *FLAGS, *drafts, **{FAULTS: faults}) as server, client() as http:
        expected = await tell_all(http, server)
        assert "injected at worker.draft" in (await server.logged("drafter disabled"))["reason"]
        await server.settled(http)
        assert [value for _, value in await server.labelled(http, "penstock_drafter_failed")] == [1]
        assert num_deaths(server) == 0
        poison = {"messages": messages(*URLS)}
        assert await deaths_beside(http, server, expected, **poison) == ("request_ends_workers", 2)
        assert await deaths_beside(http, server, expected, messages=messages(URLS[0])) == ("", 0), "it is innocent"
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        grammar = {"messages": messages(URLS[0]), "response_format": form}
        assert await deaths_beside(http, server, expected, **grammar) == ("request_ends_workers", 2)
        await server.settled(http)


async def test_two_engines_do_not_hand_on_what_ends_workers(seeing: Seeing) -> None:
    """The second engine hears of the suspicion, and makes the image alone at once."""
    flags = (*FLAGS, "--data-parallel-size", "2")
    async with serving(seeing.folder, *flags, **{FAULTS: ENDS}) as server, client() as http:
        await until_both_are_ready(server, http)
        expected = await tell_all(http, server)
        poison = {"messages": messages(*URLS)}
        assert await deaths_beside(http, server, expected, **poison) == ("request_ends_workers", 2)
        await until_both_are_ready(server, http)
        assert await deaths_beside(http, server, expected, messages=messages(URLS[0])) == ("", 0)
        await server.settled(http)
