"""Structured output on the tokenizers of trained models: schemas of the whole dialect, at random."""

import asyncio
import json
from collections import Counter

import aiohttp
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.models.finding.registry import open_checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary
from penstock.parts.grammars.child.json_check import mismatch
from tests.e2e.servers import Server
from tests.faults.soak import sized
from tests.faults.streams import client
from tests.parts.grammars.dialect import SCHEMAS, Schema, Writer
from tests.real.fetched import gemma3, only_real, smollm2, the_file

pytestmark = only_real


@pytest.fixture(scope="module", params=[smollm2, gemma3], ids=["smollm2", "gemma3"])
def writer(request: pytest.FixtureRequest) -> Writer:
    return Writer(grammar_vocabulary(open_checkpoint(the_file(request.param))))


@pytest.mark.timeout(sized(300, 3600))
@settings(
    max_examples=sized(200, 4000),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_answers_that_end_are_valid_and_none_is_stuck(writer: Writer, schema: Schema, seed: int) -> None:
    writer.check(schema, seed)


def drawn(num: int) -> list[Schema]:
    """Schemas of the dialect, the same ones each time."""
    found: list[Schema] = []

    @settings(max_examples=num, database=None, derandomize=True, phases=[Phase.generate])
    @given(schema=SCHEMAS)
    def collect(schema: Schema) -> None:
        found.append(schema)

    collect()
    return found


@pytest.mark.asyncio(loop_scope="session")
async def test_a_trained_model_under_schemas_served(chat_server: Server) -> None:
    """No stream breaks off: it ends by itself, and then with a valid text, or at its last token."""
    ends = Counter[str]()

    async def ask(http: aiohttp.ClientSession, number: int, schema: Schema) -> None:
        messages = [{"role": "user", "content": f"Write JSON, number {number}."}]
        body = {"model": "m", "messages": messages, "structured_outputs": {"json": schema}, "seed": number}
        body |= {"max_tokens": 150, "temperature": 1, "stream": True}
        async with http.post(f"{chat_server.url}/v1/chat/completions", json=body) as response:
            if response.status == 400:
                assert "structured_outputs.json" in (await response.text())
                ends["refused"] += 1
                return
            assert response.status == 200, await response.text()
            is_whole = "x-penstock-warning" not in response.headers
            lines = [line[6:] async for line in response.content if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]\n", (schema, lines[-1])
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        ends[choices[-1]["finish_reason"]] += 1
        if choices[-1]["finish_reason"] == "stop" and is_whole:
            assert mismatch(json.dumps(schema), text) == "", (schema, text)

    turns = asyncio.Semaphore(8)

    async def in_turn(http: aiohttp.ClientSession, number: int, schema: Schema) -> None:
        async with turns:
            await ask(http, number, schema)

    async with client() as http:
        await asyncio.gather(*(in_turn(http, *each) for each in enumerate(drawn(sized(80, 1000)))))
    print(dict(ends))
    assert ends["stop"] > ends["refused"]
