"""Guesses through real processes: the same streams with and without them, in fewer steps."""

import asyncio
import json
import random
from typing import Any

import aiohttp

from tests.e2e.checkpoints import greedy
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving, stream

CONFIG = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
LENGTH = 80


def requests_of(seed: int) -> list[dict[str, Any]]:
    """Greedy and sampled completions of prompts that repeat themselves."""
    rng = random.Random(seed)
    found = []
    for i in range(6):
        words = [rng.randrange(3, 259) for _ in range(rng.randint(3, 9))]
        sampling = {"temperature": 0.0} if i % 2 else {"temperature": 0.4, "seed": i, "top_p": 0.9}
        more = {"logprobs": 1, "min_tokens": 5, "repetition_penalty": 1.05} if i == 3 else {}
        found.append(
            {"model": "m", "prompt": words * 3, "max_tokens": LENGTH, "return_token_ids": True} | sampling | more
        )
    return found


async def tokens(http: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> tuple[list[int], list[Any]]:
    """A stream's tokens, and all else that it says of them but its pieces."""
    ids, logprobs = list[int](), list[Any]()
    async for event in stream(http, f"{server.url}/v1/completions", body | {"ignore_eos": True}):
        for choice in event["choices"]:
            ids += choice.get("token_ids") or []
            if choice.get("logprobs"):
                logprobs += choice["logprobs"]["token_logprobs"]
    return ids, logprobs


async def run(
    http: aiohttp.ClientSession, server: Server, requests: list[dict[str, Any]], **more: Any
) -> list[tuple[list[int], list[Any]]]:
    """All at once."""
    return list(await asyncio.gather(*[tokens(http, server, body | more) for body in requests]))


async def guessed(http: aiohttp.ClientSession, server: Server) -> tuple[float, float]:
    """Tokens guessed since the start, and those of them that were right."""
    await server.settled(http)
    names = ("penstock_draft_guessed_tokens_total", "penstock_draft_accepted_tokens_total")
    counts = [[value for _, value in await server.labelled(http, name)] for name in names]
    return sum(counts[0]), sum(counts[1])


async def test_streams_are_the_same_in_fewer_steps(checkpoint: Checkpoint) -> None:
    flags = ("--served-model-name", "m", "--dtype", "float32", "--num-pages", "400")
    requests = requests_of(1)
    async with (
        serving(checkpoint.folder, *flags, "--speculative-config", CONFIG) as server,
        aiohttp.ClientSession() as http,
    ):
        plain = await run(http, server, requests, speculative=False)
        assert await guessed(http, server) == (0, 0)
        limit = {"num_speculative_tokens": 1}
        some = [body | {"speculative": (None, limit)[i % 2]} for i, body in enumerate(requests)]
        num_accepted = 0.0
        while not num_accepted:  # when it is tried follows the steps' times, and a busy machine's tell little
            assert await run(http, server, some) == plain
            num_guessed, num_accepted = await guessed(http, server)
            assert num_guessed >= num_accepted
        before = (await server.settled(http))["penstock_engine_steps_total"]
        assert await run(http, server, requests[1:2]) == plain[1:2]
        after = (await server.settled(http))["penstock_engine_steps_total"]
        accepted_since = (await guessed(http, server))[1] - num_accepted
        assert after - before <= LENGTH + 1 - accepted_since  # with depth 1, one step may come after the last token
    for body, (ids, _) in zip(requests, plain, strict=True):
        assert len(ids) == LENGTH
        if not body["temperature"] and "repetition_penalty" not in body:
            assert ids == greedy(checkpoint.model, body["prompt"], LENGTH)
