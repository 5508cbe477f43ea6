"""The official client works unchanged: sync, async, streaming, several choices, stop strings, errors."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.frontend.fake_scheduler import Script
from tests.frontend.live_server import LiveServer

HELLO: Any = [{"role": "user", "content": "Hello"}]
TEXT = "Water runs down the pipe, and the gate opens."
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def num_tokens(live: LiveServer, text: str) -> int:
    return len(live.tokenizer.encode(text, add_special_tokens=False))


def test_chat(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT, num_cached_tokens=16)
    answer = client.chat.completions.create(model="test/model", messages=HELLO)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "test/model"
    [choice] = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", TEXT)
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_tokens(live, PROMPT)
    assert answer.usage.completion_tokens == num_tokens(live, TEXT) + 1  # and the stop token
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


def test_chat_stream(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    chunks = list(
        client.chat.completions.create(
            model="test/model", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-2])
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == num_tokens(live, TEXT) + 1
    assert len({c.id for c in chunks}) == 1


async def test_async_chat_and_stream(live: LiveServer) -> None:
    live.says(TEXT)
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="alias", messages=HELLO)
        assert answer.choices[0].message.content == TEXT
        assert answer.model == "alias"
        stream = await client.chat.completions.create(model="alias", messages=HELLO, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == TEXT


def test_three_choices(client: openai.OpenAI, live: LiveServer) -> None:
    texts = ["The gate opens.", "Water runs.", "Hello world, I am fine."]
    live.plays(lambda request, i: Script(live.tokenizer.encode(texts[i], add_special_tokens=False)))
    answer = client.chat.completions.create(model="test/model", messages=HELLO, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == texts
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_tokens(live, PROMPT)
    assert answer.usage.completion_tokens == sum(num_tokens(live, text) + 1 for text in texts)

    parts = ["", "", ""]
    ends: list[int] = []
    for chunk in client.chat.completions.create(model="test/model", messages=HELLO, n=3, stream=True):
        [choice] = chunk.choices
        parts[choice.index] += choice.delta.content or ""
        if choice.finish_reason is not None:
            ends.append(choice.index)
    assert parts == texts
    assert sorted(ends) == [0, 1, 2]
    assert [request.n for request in live.scheduler.added] == [3, 3]


def test_stop_strings(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT, hangs=True)
    answer = client.chat.completions.create(model="test/model", messages=HELLO, stop=["pipe, and", "never"])
    assert answer.choices[0].message.content == "Water runs down the "
    assert answer.choices[0].finish_reason == "stop"
    live.wait_until(lambda: [abort.sequence_idx for abort in live.scheduler.aborted] == [0])
    completion = client.completions.create(model="test/model", prompt="x", stop="gate", max_tokens=64)
    assert completion.choices[0].text == "Water runs down the pipe, and the "
    assert completion.choices[0].finish_reason == "stop"


def test_completions(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    answer = client.completions.create(model="test/model", prompt="Water", max_tokens=64)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == TEXT
    stream = client.completions.create(model="test/model", prompt="Water", max_tokens=64, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["test/model", "alias"]
    model = client.models.retrieve("test/model")
    assert (model.id, model.object, model.owned_by) == ("test/model", "model", "penstock")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("test/other")
    assert caught.value.code == "model_not_found"


def test_errors(client: openai.OpenAI, live: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt-x", messages=HELLO)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="test/model", prompt=[5] * 512)
    assert too_long.value.code == "context_length_exceeded"
    assert "512" in too_long.value.message
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="test/model", messages=HELLO, temperature=-1)
    assert wrong.value.param == "temperature"
    live.gives([], error="the queue holds 4 sequences, the limit is 4", error_code="queue_full")
    with pytest.raises(openai.RateLimitError) as full:
        client.chat.completions.create(model="test/model", messages=HELLO, stream=True)
    assert full.value.code == "queue_full"
    assert int(full.value.response.headers["retry-after"]) >= 1
    live.gives([5], error="a device error", per_step=2)
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="test/model", messages=HELLO)
    assert failed.value.code == "engine_error"


def test_error_after_the_first_byte(client: openai.OpenAI, live: LiveServer) -> None:
    live.says("Water runs", error="a device error", delay=0.02)
    stream = client.chat.completions.create(model="test/model", messages=HELLO, stream=True)
    seen: list[str] = []
    with pytest.raises(openai.APIError, match="a device error"):
        seen.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(seen) == "Water runs"
