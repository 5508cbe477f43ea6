"""The official client, unchanged, against the real server; and what bad input gets."""

import asyncio
from typing import Any

import aiohttp
import openai
import pytest

from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving

MESSAGES: Any = [{"role": "user", "content": "Hello there"}]

BAD_REQUESTS: list[tuple[str, int, str]] = [
    ("{", 400, ""),
    ("[]", 400, ""),
    ('{"model": "m", "messages": "hello"}', 400, "messages"),
    ('{"model": "m", "messages": []}', 400, "messages"),
    ('{"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]}', 404, "no-such-model"),
    ('{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', 400, "temperature"),
    ('{"model": "m", "messages": [{"role": "user", "content": "x"}], "top_p": 2}', 400, "top_p"),
    ('{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 0}', 400, "n"),
    ('{"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": -2}', 400, "max_tokens"),
    ('{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, ""),
]


def with_sync_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["m"]
        assert client.models.retrieve("m").id == "m"
        whole = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=24, temperature=0)
        text = whole.choices[0].message.content
        assert text
        assert whole.usage is not None
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        chunks = list(
            client.chat.completions.create(
                model="m",
                messages=MESSAGES,
                max_tokens=24,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None
        stop = text[3:5]
        stopped = client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=24, temperature=0, stop=[stop, "never to be seen"]
        )
        assert stopped.choices[0].finish_reason == "stop"
        assert stopped.choices[0].message.content == text[: text.index(stop)]
        three = client.completions.create(model="m", prompt="abc", n=3, max_tokens=8, seed=7, temperature=1.0)
        again = client.completions.create(model="m", prompt="abc", n=3, max_tokens=8, seed=7, temperature=1.0)
        texts = [choice.text for choice in three.choices]
        assert len(set(texts)) == 3
        assert [choice.text for choice in again.choices] == texts
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="nobody", messages=MESSAGES)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as too_long:
            client.completions.create(model="m", prompt=[5] * 600)
        assert too_long.value.code == "context_length_exceeded"
        assert "512" in too_long.value.message
        assert "600" in too_long.value.message


async def with_async_client(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def one(i: int) -> str:
            answer = await client.completions.create(model="m", prompt=f"prompt {i}", max_tokens=16, temperature=0)
            return answer.choices[0].text

        async def streamed(i: int) -> str:
            pieces = await client.completions.create(
                model="m", prompt=f"prompt {i}", max_tokens=16, temperature=0, stream=True
            )
            return "".join([piece.choices[0].text async for piece in pieces if piece.choices])

        whole = await asyncio.gather(*(one(i) for i in range(8)))
        assert await asyncio.gather(*(streamed(i) for i in range(8))) == whole


async def with_bad_input(server: Server) -> None:
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for text, status, word in BAD_REQUESTS:
            async with http.post(f"{server.url}/v1/chat/completions", data=text) as response:
                answer = await response.json()
                assert response.status == status, (text, answer)
                assert set(answer["error"]) == {"message", "type", "param", "code"}
                assert word in answer["error"]["message"] or word == answer["error"]["param"], (text, answer)
        async with http.get(f"{server.url}/no/such/path") as response:
            assert response.status == 404
            assert "error" in await response.json()


async def test_the_official_client_works_and_bad_input_harms_nobody(checkpoint: Checkpoint) -> None:
    async with serving(checkpoint.folder, "--served-model-name", "m", "--max-model-len", "512") as server:
        await asyncio.to_thread(with_sync_client, server)
        await with_async_client(server)
        await with_bad_input(server)
        await asyncio.to_thread(with_sync_client, server)  # and the server goes on
        async with aiohttp.ClientSession() as http:
            metrics = await server.settled(http)
        assert (
            metrics["penstock_num_free_pages"] + metrics["penstock_num_cached_pages"] == metrics["penstock_num_pages"]
        )
