"""The whole path through real processes: right tokens, shared prefixes, many streams, clients that leave."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.checkpoints import greedy
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving, stream
from tests.internal_fields import internal

VOCAB = range(3, 259)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.choice(VOCAB) for _ in range(length)]


def body(prompt: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | more


async def collect(http: aiohttp.ClientSession, server: Server, request: dict[str, Any]) -> dict[int, str]:
    """Stream a completion; the text of each choice."""
    texts: dict[int, str] = {}
    finished: dict[int, str] = {}
    async for event in stream(http, f"{server.url}/v1/completions", request):
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                assert index not in finished, "one end per sequence"
                finished[index] = choice["finish_reason"]
    assert finished.keys() == texts.keys()
    return texts


async def complete(http: aiohttp.ClientSession, server: Server, request: dict[str, Any]) -> dict[str, Any]:
    async with http.post(f"{server.url}/v1/completions", json=request) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


@pytest.mark.parametrize(
    ("depth", "flags"),
    [
        (0, ("--page-size", "1", "--max-num-batched-tokens", "16")),
        # 24 pages of 16 tokens for six sequences of up to 364, each of which grows by four pages: if they overlap, some
        # are preempted.
        (2, ("--num-pages", "24", "--no-enable-prefix-caching", "--max-model-len", "380")),
    ],
    ids=["depth0-pages1-budget16", "depth2-tiny-pool"],
)
async def test_greedy_output_equals_transformers(checkpoint: Checkpoint, depth: int, flags: tuple[str, ...]) -> None:
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (1, 2, 17, 64, 129, 300)]
    async with (
        serving(checkpoint.folder, "--served-model-name", "m", *flags, **internal(pipeline_depth=depth)) as server,
        aiohttp.ClientSession() as http,
    ):
        requests = [body(prompt, 64, return_token_ids=True, n=2 if i == 2 else 1) for i, prompt in enumerate(prompts)]
        expected = [greedy(checkpoint.model, prompt, 64) for prompt in prompts]
        for _ in range(10):  # on a busy machine requests may come one after the other
            answers = await asyncio.gather(*(complete(http, server, request) for request in requests))
            for tokens, answer in zip(expected, answers, strict=True):
                assert all(choice["token_ids"] == tokens for choice in answer["choices"])
            metrics = await server.settled(http)
            if "--num-pages" not in flags or metrics["penstock_num_preemptions_total"] > 0:
                break
        if "--num-pages" in flags:
            assert metrics["penstock_num_preemptions_total"] > 0


async def test_200_streams_get_their_solo_texts_and_leave_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    rng = random.Random(2)
    requests = []
    for i in range(200):
        sampling = {} if i % 2 else {"temperature": 1.0, "seed": i, "top_p": 0.9, "top_k": 50}
        requests.append(body(random_prompt(rng, rng.randint(1, 120)), rng.randint(1, 40), **sampling))
    trace = tmp_path / "steps.jsonl"
    flags = ("--served-model-name", "m", "--step-trace", str(trace), "--max-num-batched-tokens", "256")
    async with (
        serving(checkpoint.folder, *flags) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        together = await asyncio.gather(*(collect(http, server, request) for request in requests))
        for i in range(0, 200, 9):
            assert await collect(http, server, requests[i]) == together[i], f"request {i} alone differs"
        metrics = await server.settled(http)
        assert (
            metrics["penstock_num_free_pages"] + metrics["penstock_num_cached_pages"] == metrics["penstock_num_pages"]
        )
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [step["step_id"] for step in steps] == sorted(step["step_id"] for step in steps)
    rows = [{(name, index) for name, index, *_ in step["rows"]} for step in steps]
    joined_and_left = [
        k for k in range(1, len(rows) - 1) if rows[k + 1] - rows[k] and rows[k] - rows[k + 1] and rows[k] & rows[k + 1]
    ]
    assert joined_and_left, "between two steps of others, some request joined and another left"
    assert any(len(step["rows"]) > 1 and len({row[2] for row in step["rows"]}) > 1 for step in steps), "mixed steps"


async def test_a_shared_prefix_is_computed_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    prompt = random_prompt(random.Random(3), 150)
    trace = tmp_path / "steps.jsonl"
    async with (
        serving(checkpoint.folder, "--served-model-name", "m", "--step-trace", str(trace)) as server,
        aiohttp.ClientSession() as http,
    ):
        first = await complete(http, server, body(prompt, 4))
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await server.settled(http)
        second = await complete(http, server, body([*prompt[:100], *prompt[:50]], 4))
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96  # six pages of 16
        same = await complete(http, server, body(prompt, 4))
        assert same["usage"]["prompt_tokens_details"]["cached_tokens"] == 144
        assert same["choices"] == first["choices"]
        salted = await complete(http, server, body(prompt, 4, cache_salt="another tenant"))
        assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    first_chunks = [row[2] for step in steps for row in step["rows"] if row[2] > 1]
    assert first_chunks == [150, 54, 6, 150]


async def test_clients_that_leave_free_their_rows_and_pages_at_once(checkpoint: Checkpoint) -> None:
    rng = random.Random(4)
    flags = ("--served-model-name", "m", "--max-num-batched-tokens", "16", "--max-model-len", "2048")
    async with (
        serving(checkpoint.folder, *flags, "--cpu-kernels", "torch") as server,  # the slower ones
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):

        async def leave_mid_stream(i: int) -> None:
            request = body(random_prompt(rng, 8), 1500, seed=i)
            async with http.post(f"{server.url}/v1/completions", json=request | {"stream": True}) as response:
                await response.content.readline()
                await response.content.readline()

        async def leave_in_prefill() -> None:  # 2000 tokens at 16 a step: more than a hundred steps
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(complete(http, server, body(random_prompt(rng, 2000), 60)), 0.03)

        await asyncio.gather(*(leave_mid_stream(i) for i in range(50)))
        told = "penstock_engine_generation_tokens_total"
        before = (await server.settled(http))[told]
        assert before < 50 * 1500 / 2, "they did not run to their ends"
        await asyncio.gather(*(leave_in_prefill() for _ in range(10)))
        assert (await server.settled(http))[told] - before < 10 * 10, "nor did these"
        assert (await complete(http, server, body([5, 6], 2)))["usage"]["completion_tokens"] == 2
