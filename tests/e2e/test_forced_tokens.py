"""Requests with a schema through real processes: the same answers in fewer steps."""

import asyncio
import json
from typing import Any

import aiohttp

from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving

CONFIG = json.dumps({"method": "grammar"})
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_identification": {"type": "integer", "minimum": 0, "maximum": 9999},
        "shipping_address_line": {"type": "string", "maxLength": 12},
        "delivery": {"enum": ["standard delivery", "express delivery"]},
    },
    "required": ["customer_identification", "shipping_address_line", "delivery"],
    "additionalProperties": False,
}


def bodies() -> list[dict[str, Any]]:
    """With a schema: greedy, sampled, of several choices, with stop strings in the midst of forced tokens; and free."""
    schema = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}
    }
    each: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "seed": 1, "n": 3},
        {"temperature": 1.0, "seed": 2, "stop": ["fication", "zzz"]},
        {"temperature": 1.0, "seed": 3, "stop": ['"deliv'], "include_stop_str_in_output": True},
        {"temperature": 1.0, "seed": 4, "max_tokens": 21},
    ]
    prompt = {"model": "m", "prompt": "A pipe, please.", "max_tokens": 300}
    free = {"temperature": 1.0, "seed": 5, "stop": ["e"], "max_tokens": 40}
    return [prompt | schema | more for more in each] + [prompt | free]


async def answers(http: aiohttp.ClientSession, server: Server) -> tuple[list[Any], float]:
    """What each request gets, one after the other, and the number of steps of all."""
    await server.settled(http)
    before = (await server.settled(http))["penstock_engine_steps_total"]
    found = []
    for body in bodies():
        async with http.post(f"{server.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
            found.append((answer["choices"], answer["usage"]["completion_tokens"]))
    return found, (await server.settled(http))["penstock_engine_steps_total"] - before


async def test_answers_are_the_same_in_fewer_steps(checkpoint: Checkpoint) -> None:
    flags = ("--served-model-name", "m", "--dtype", "float32", "--num-pages", "400")
    async with aiohttp.ClientSession() as http:
        async with serving(checkpoint.folder, *flags) as server:
            expected, num_plain_steps = await answers(http, server)
        async with serving(checkpoint.folder, *flags, "--speculative-config", CONFIG) as server:
            found, num_steps = await answers(http, server)
            counts = await asyncio.gather(
                *(server.labelled(http, f"penstock_draft_{name}_tokens_total") for name in ("guessed", "accepted"))
            )
    assert found == expected
    assert list(json.loads(expected[0][0][0]["text"])) == SCHEMA["required"]
    assert expected[2][0][0]["text"].endswith("customer_identi")
    assert num_steps < 0.7 * num_plain_steps
    num_guessed, num_accepted = (sum(value for _, value in each) for each in counts)
    assert 0 < num_accepted == num_guessed
