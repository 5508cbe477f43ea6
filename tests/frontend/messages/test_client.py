"""Anthropic's own client works unchanged: whole and streamed messages, tools, thinking, counting, models, errors."""

import json
import socket
from typing import Any

import anthropic
import msgspec
import pydantic
import pytest

from penstock.parts.anthropic.frontend.models import model_infos, page
from tests.frontend.fake_scheduler import Script
from tests.frontend.live_server import LiveServer
from tests.frontend.messages.conftest import prompt_text
from tests.frontend.parsing.test_tools import CALL, THOUGHT

HELLO: Any = [{"role": "user", "content": "Hello"}]
TEXT = "Water runs down the pipe."
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a place",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def create(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**({"model": "test/model", "max_tokens": 256, "messages": HELLO} | fields))


def streamed(client: anthropic.Anthropic, **fields: Any) -> Any:
    """The message that the client puts together from a stream's events."""
    given = {"model": "test/model", "max_tokens": 256, "messages": HELLO} | fields
    with client.messages.stream(**given) as stream:
        return stream.get_final_message()


def facts(message: Any) -> dict[str, Any]:
    """What does not differ from one request to the next."""
    found: dict[str, Any] = message.to_dict()
    assert found.pop("id").startswith("msg_")
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return found


def test_a_text(client: anthropic.Anthropic, live: LiveServer) -> None:
    live.says(TEXT, num_cached_tokens=16)
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3}  # later clients do not name them any more
    message = create(client, system="Be kind.", stop_sequences=["none such"], extra_body=sampling)
    sampled = live.scheduler.added[-1].sampling
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.seed) == (0.5, 0.9, 5, 3)
    [block] = message.content
    assert (block.type, block.text) == ("text", TEXT)
    assert (message.type, message.role, message.model) == ("message", "assistant", "test/model")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.cache_read_input_tokens == 16
    assert message.usage.input_tokens + 16 == len(live.scheduler.added[-1].prompt_token_ids) // 4
    assert message.usage.output_tokens == len(live.tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    assert message._request_id is not None
    assert prompt_text(live) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )


OUTPUTS = ["", TEXT, CALL, THOUGHT + TEXT, THOUGHT + "I look.\n" + CALL + CALL]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("thinking", [{}, {"thinking": THINKING}, {"thinking": THINKING | {"display": "omitted"}}])
@pytest.mark.parametrize("per_step", [1, 1000])
def test_streamed_and_whole_messages_are_equal(
    client: anthropic.Anthropic, live: LiveServer, output: str, thinking: dict[str, Any], per_step: int
) -> None:
    live.says(output, per_step=per_step)
    whole = create(client, tools=[WEATHER], **thinking)
    assert facts(streamed(client, tools=[WEATHER], **thinking)) == facts(whole)
    kinds = [block.type for block in whole.content]
    assert ("thinking" in kinds) == bool(thinking and "<think>" in output)
    assert kinds.count("tool_use") == output.count("<tool_call>")
    assert whole.stop_reason == ("tool_use" if CALL in output else "end_turn")


async def test_async_streams_and_the_beta_routes(live: LiveServer) -> None:
    live.says(TEXT)
    async with anthropic.AsyncAnthropic(base_url=live.url, auth_token="none", max_retries=0) as client:
        async with client.messages.stream(model="alias", max_tokens=99, messages=HELLO) as stream:
            assert "".join([text async for text in stream.text_stream]) == TEXT
        message = await client.beta.messages.create(
            model="alias", max_tokens=99, messages=HELLO, betas=["interleaved-thinking-2025-05-14"]
        )
        assert message.content[0].to_dict()["text"] == TEXT


def test_a_conversation_with_a_tool(client: anthropic.Anthropic, live: LiveServer) -> None:
    live.says(THOUGHT + "I look.\n" + CALL)
    message = streamed(client, tools=[WEATHER], thinking=THINKING)
    thought, text, call = message.content
    assert (thought.thinking, text.text, call.name, call.input) == (
        "Let me see.", "I look.", "get_weather", {"city": "Tromsø"},
    )  # fmt: skip
    live.says("Cold.")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "-3"}]}
    answers: Any = {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]}
    again = create(client, messages=[*HELLO, message.to_param(), answers], tools=[WEATHER], thinking=THINKING)
    assert again.content[0].text == "Cold."
    assert prompt_text(live).endswith(
        "<|im_start|>assistant\n<think>Let me see.</think>I look."
        '<tool_call>get_weather {"city": "Tromsø"}</tool_call><|im_end|>\n'
        f"<|im_start|>tool\n-3 ({call.id})<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_hidden_thinking_comes_back(client: anthropic.Anthropic, live: LiveServer) -> None:
    live.says(THOUGHT + TEXT)
    message = create(client, thinking=THINKING | {"display": "omitted"})
    assert message.content[0].thinking == ""
    create(client, messages=[*HELLO, message.to_param(), *HELLO], thinking=THINKING)
    assert f"<think>Let me see.</think>{TEXT}" in prompt_text(live)


@pytest.mark.parametrize(
    ("choice", "must_call", "parallel"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "any"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
        ({"type": "tool", "name": "get_weather"}, True, False),
        ({"type": "none"}, False, False),
    ],
)
def test_tool_choices(
    client: anthropic.Anthropic, live: LiveServer, choice: Any, must_call: bool, parallel: bool
) -> None:
    live.says(CALL + CALL)
    message = create(client, tools=[WEATHER], tool_choice=choice)
    is_offered = choice["type"] != "none"
    assert ("<tools>" in prompt_text(live)) == is_offered
    assert bool(live.scheduler.added[-1].sampling.grammar) == must_call
    kinds = [block.type for block in message.content]
    assert kinds == (["tool_use"] * (2 if parallel else 1) if is_offered else ["text"])


class Report(pydantic.BaseModel):
    """What an answer is to look like."""

    city: str
    degrees: int


def test_an_object_instead_of_a_text(client: anthropic.Anthropic, live: LiveServer) -> None:
    live.says('{"city": "Ulm", "degrees": 12}')
    message = client.messages.parse(model="test/model", max_tokens=256, messages=HELLO, output_format=Report)
    assert message.parsed_output == Report(city="Ulm", degrees=12)
    assert "degrees" in live.scheduler.added[-1].sampling.grammar


def test_counting(client: anthropic.Anthropic, live: LiveServer) -> None:
    live.says(TEXT)
    asked: Any = {"system": [{"type": "text", "text": "Be kind."}], "tools": [WEATHER], "thinking": THINKING}
    counted = client.messages.count_tokens(model="test/model", messages=HELLO, **asked)
    message = create(client, **asked)
    assert counted.input_tokens == message.usage.input_tokens
    assert client.messages.count_tokens(model="test/model", messages=HELLO).input_tokens < counted.input_tokens


def test_a_prompt_to_be_cached_only(client: anthropic.Anthropic, live: LiveServer) -> None:
    live.says(TEXT)
    for message in (create(client, max_tokens=0), streamed(client, max_tokens=0)):
        assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


def test_models(client: anthropic.Anthropic, live: LiveServer) -> None:
    [first, second] = list(client.models.list())
    assert [first.id, second.id] == ["test/model", "alias"]
    assert (first.type, first.display_name, first.lifecycle, first.max_input_tokens) == (
        "model", "test/model", "active", 2048,
    )  # fmt: skip
    assert first.created_at.tzinfo is not None
    assert first.capabilities is not None
    assert first.capabilities.thinking.types.enabled.supported
    assert not first.capabilities.image_input.supported
    assert [model.id for model in client.models.list(limit=1)] == ["test/model", "alias"]
    assert [model.id for model in client.models.list(before_id="alias").data] == ["test/model"]
    names = ["a", "b", "c"]
    infos = [msgspec.structs.replace(info, id=name) for name in names for info in model_infos(live.server.service)[:1]]
    for query, shown, has_more in (
        ({"before_id": "c", "limit": "1"}, ["b"], True),
        ({"before_id": "b", "limit": "1"}, ["a"], False),
        ({"after_id": "a", "limit": "1"}, ["b"], True),
        ({"after_id": "b"}, ["c"], False),
    ):
        told = json.loads(page(infos, query).body)
        assert ([info["id"] for info in told["data"]], told["has_more"]) == (shown, has_more)
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.models.retrieve("other")
    assert raised.value.type == "not_found_error"


def test_calls_that_are_no_json(client: anthropic.Anthropic, live: LiveServer) -> None:
    cut = CALL.partition("Troms")[0]
    live.says(cut)
    [block] = create(client, tools=[WEATHER]).content
    assert block.input == {"INVALID_JSON": '{"city": "'}


# --- errors -----------------------------------------------------------------------------------


def test_errors(client: anthropic.Anthropic, live: LiveServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        create(client, model="claude-none")
    assert (unknown.value.type, unknown.value.status_code) == ("not_found_error", 404)
    assert unknown.value.request_id == unknown.value.response.headers["request-id"]
    body: Any = unknown.value.body
    assert body["type"] == "error"
    assert body["request_id"] == unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is required"):
        client.post("/v1/messages", body={"model": "test/model", "messages": HELLO}, cast_to=object)
    with pytest.raises(anthropic.BadRequestError, match="the context length is 2048 tokens"):
        create(client, messages=[{"role": "user", "content": "word " * 3000}])


def test_routes_that_do_not_exist(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.messages.batches.retrieve("msgbatch_none")
    assert (raised.value.type, raised.value.request_id is not None) == ("not_found_error", True)


def test_a_full_queue_is_an_overload(client: anthropic.Anthropic, live: LiveServer) -> None:
    live.plays(lambda request, index: Script(error="the queue is full", error_code="queue_full"))
    with pytest.raises(anthropic.OverloadedError) as raised:
        create(client)
    assert raised.value.status_code == 529
    assert raised.value.type == "overloaded_error"
    assert int(raised.value.response.headers["retry-after"]) > 0


def test_an_error_in_a_stream(client: anthropic.Anthropic, live: LiveServer) -> None:
    ids = live.tokenizer.encode(TEXT, add_special_tokens=False)
    live.plays(lambda request, index: Script(ids, error="no more", delay=0.01))
    with pytest.raises(anthropic.APIStatusError) as raised:
        streamed(client)
    assert raised.value.type == "api_error"
    assert "no more" in str(raised.value)


def test_a_client_that_leaves(client: anthropic.Anthropic, live: LiveServer) -> None:
    live.says(TEXT, hangs=True)
    with client.messages.stream(model="test/model", max_tokens=99, messages=HELLO) as stream:
        next(iter(stream.text_stream))
    live.wait_until(lambda: len(live.scheduler.aborted) == 1)


def test_head_and_chunks_on_the_wire(live: LiveServer) -> None:
    """What a client without any library sees."""
    live.says(TEXT)
    given = json.dumps({"max_tokens": 9, "messages": HELLO, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(
            b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nanthropic-version: 2023-06-01\r\n"
            b"X-Api-Key: none\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(given) + given
        )
        with connection.makefile("rb") as file:
            assert b"event: message_start\ndata: {" in file.read()
