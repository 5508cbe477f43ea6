"""Draws a workload: lengths, arrivals and prompts, from one seed."""

import random
from collections.abc import Sequence

import aiohttp
import msgspec

from penstock.bench.load.job import PlannedRequest

_WORDS = (
    "time person year way day thing man world life hand part child eye woman place work week case point company "
    "number group problem fact water room mother area money story month lot right study book job word business issue "
    "side kind head house service friend father power hour game line end member law car city name team minute idea"
)


class WorkloadError(Exception):
    """The server cannot be asked for what the workload needs."""


def draw(
    num_requests: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    request_rate: float,
    vocabulary: Sequence[int],
    shared_prefix_len: int,
    seed: int,
) -> list[PlannedRequest]:
    """Requests with uniform lengths; Poisson arrivals at `request_rate` per second, or all at once for 0.

    Prompts are random ids of `vocabulary`, or random words where it is empty; the first
    `shared_prefix_len` of them are the same in all prompts.
    """
    rng = random.Random(seed)
    words = _WORDS.split()
    prefix = [rng.random() for _ in range(shared_prefix_len)]
    arrival = 0.0
    requests: list[PlannedRequest] = []
    for _ in range(num_requests):
        length = max(rng.randint(*input_len), shared_prefix_len)
        draws = prefix + [rng.random() for _ in range(length - shared_prefix_len)]
        prompt: str | list[int] = " ".join(words[int(x * len(words))] for x in draws)
        if vocabulary:
            prompt = [vocabulary[int(x * len(vocabulary))] for x in draws]
        requests.append(PlannedRequest(arrival, prompt, rng.randint(*output_len)))
        if request_rate:
            arrival += rng.expovariate(request_rate)
    return requests


async def served_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The first model that the server lists.

    Raises:
        WorkloadError: if it lists none.
    """
    try:
        async with session.get(f"{base_url}/models") as response:
            response.raise_for_status()
            return str(msgspec.json.decode(await response.read())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, msgspec.MsgspecError, LookupError, TypeError) as error:
        raise WorkloadError(f"{base_url}/models names no model: {error}") from None


async def harmless_token_ids(session: aiohttp.ClientSession, base_url: str, model: str) -> list[int]:
    """Ids of ordinary words, from the server's own /tokenize; empty if it has none.

    Random ids out of the whole vocabulary would hit special tokens and odd bytes.
    """
    try:
        async with session.post(
            base_url.removesuffix("/v1") + "/tokenize", json={"model": model, "prompt": _WORDS}
        ) as response:
            if response.status != 200:
                return []
            found = msgspec.json.decode(await response.read())["tokens"]
            return sorted({int(token_id) for token_id in found})
    except (aiohttp.ClientError, OSError, msgspec.MsgspecError, LookupError, TypeError, ValueError):
        return []
