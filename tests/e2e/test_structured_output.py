"""Structured output against the real server: the official client's helpers, faults, neighbours."""

import asyncio
import itertools
import json
import signal
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import aiohttp
import jsonschema
import openai
import psutil
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving, stream

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = ("--served-model-name", "m", "--dtype", "float32")
MESSAGES: Any = [{"role": "user", "content": "Hello there"}]
SEED = 7
LONG: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[a-z]{20,25}$"},
    "minItems": 12,
    "maxItems": 12,
}
HOSTILE: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "((a{1000}){1000}){1000}"}},
    {"structured_outputs": {"regex": "a" * 1_000_000}},
    {"structured_outputs": {"grammar": "start: start"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://169.254.169.254/"}}}},
]


class Part(BaseModel):
    kind: Literal["pipe", "gate"]
    length: Annotated[int, Field(ge=1, le=500)]


class Plan(BaseModel):
    title: Annotated[str, Field(max_length=12)]
    parts: Annotated[list[Part], Field(min_length=1, max_length=3)]
    is_done: bool | None


def parse_with_the_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.parse(model="m", messages=MESSAGES, response_format=Plan, seed=SEED)
        plan = whole.choices[0].message.parsed
        assert isinstance(plan, Plan)
        assert 1 <= plan.parts[0].length <= 500
        with client.chat.completions.stream(model="m", messages=MESSAGES, response_format=Plan, seed=SEED) as streamed:
            final = streamed.get_final_completion()
        assert final.choices[0].message.parsed == plan
        response = client.responses.parse(model="m", input="Hello there", text_format=Plan)
        assert isinstance(response.output_parsed, Plan)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(checkpoint: Checkpoint) -> AsyncIterator[Server]:
    """One for all tests: what one of them kills is there again for the next."""
    async with serving(checkpoint.folder, *FLAGS) as server:
        yield server


async def test_the_official_clients_parse(server: Server) -> None:
    await asyncio.to_thread(parse_with_the_client, server)


async def text_of(
    http: aiohttp.ClientSession, server: Server, begun: asyncio.Event | None = None, **fields: Any
) -> str:
    """The text of a stream; `begun` is set when the first of it came."""
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 500, "seed": SEED} | fields
    text = ""
    async for event in stream(http, f"{server.url}/v1/completions", body):
        text += event["choices"][0]["text"] if event["choices"] else ""
        if text and begun is not None:
            begun.set()
    return text


async def test_a_killed_worker_and_hostile_grammars_change_no_text(server: Server) -> None:
    constrained: dict[str, Any] = {"structured_outputs": {"json": LONG}}
    async with aiohttp.ClientSession() as http:
        expected = await text_of(http, server, **constrained)
        jsonschema.validate(json.loads(expected), LONG)
        free = await text_of(http, server, ignore_eos=True)

        async def pair(*begun: asyncio.Event) -> list[str]:
            fields: list[dict[str, Any]] = [constrained, {"ignore_eos": True}]
            events = begun or (None, None)
            return await asyncio.gather(
                *(text_of(http, server, event, **each) for event, each in zip(events, fields, strict=True))
            )

        refused = asyncio.Event()

        async def beside() -> None:
            while not refused.is_set():  # as many as the grammars last, however fast the machine is
                assert await pair() == [expected, free]

        streams = asyncio.create_task(beside())
        for fields in HOSTILE:
            body = {"model": "m", "messages": MESSAGES} | fields
            async with http.post(f"{server.url}/v1/chat/completions", json=body) as response:
                assert response.status == 400, await response.text()
        refused.set()
        await asyncio.wait_for(streams, 60)

        begun = (asyncio.Event(), asyncio.Event())
        running = asyncio.create_task(pair(*begun))
        await asyncio.gather(*(event.wait() for event in begun))
        position = len(server.log)
        server.children()["penstock-worker-0"].kill()
        await server.logged("worker connected", after=position)
        assert await asyncio.wait_for(running, 60) == [expected, free]
        # A text that cannot end as asked is an error event, for that request alone.
        body = {"model": "m", "prompt": [5], "structured_outputs": {"regex": "abc"}, "min_tokens": 9, "max_tokens": 20}
        async with http.post(f"{server.url}/v1/completions", json=body | {"stream": True}) as response:
            said = await response.text()
        assert '"grammar_error"' in said
        assert "[DONE]" not in said
        assert await text_of(http, server, **constrained) == expected
        await server.settled(http)


async def test_the_process_that_reads_grammars_ends_with_its_frontend(server: Server) -> None:
    async with aiohttp.ClientSession() as http:
        assert await text_of(http, server, structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
        children = server.children()
        reader = children["penstock-grammar"]
        position = len(server.log)
        children["penstock-frontend-0"].send_signal(signal.SIGKILL)
        await asyncio.to_thread(psutil.wait_procs, [reader], 60)
        assert not reader.is_running() or reader.status() == psutil.STATUS_ZOMBIE
        await server.logged("listening", after=position)


SLOW_TO_READ = 'start: %json {"type": "integer", "multipleOf": 9999}'
"""Some hundredths of a second, each time it is read; a helper on a busy machine has two seconds for it."""


async def test_a_grammar_that_is_slow_to_read_stalls_no_other_stream(server: Server) -> None:
    async with aiohttp.ClientSession() as http:
        arrivals: list[float] = []
        go_on = asyncio.Event()

        async def honest() -> None:
            while not go_on.is_set():
                body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}
                async for _ in stream(http, f"{server.url}/v1/completions", body):
                    arrivals.append(time.monotonic())

        beside = asyncio.create_task(honest())
        slow = {"structured_outputs": {"grammar": SLOW_TO_READ}, "n": 60, "max_tokens": 3, "prompt": [5], "model": "m"}
        async with http.post(f"{server.url}/v1/completions", json=slow) as response:
            assert response.status == 200, await response.text()
            texts = [choice["text"] for choice in (await response.json())["choices"]]
        began = time.monotonic()
        async with http.post(f"{server.url}/v1/completions", json=slow | {"seed": 5}) as response:
            assert response.status == 200
        assert len(texts) == 60
        server.children()["penstock-worker-0"].kill()  # the next one reads it again: once, and beside its steps
        async with http.post(f"{server.url}/v1/completions", json=slow) as response:
            assert response.status == 200
        go_on.set()
        await beside
        gaps = [after - before for before, after in itertools.pairwise(arrivals) if after < began]
        assert max(gaps) < 4, "sixty readings would last longer"
        await server.settled(http)
