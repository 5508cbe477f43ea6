"""/v1/responses with the official client: whole, streamed, stored, continued, with tools and reasoning."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import Response as ClientResponse

from penstock.parts.responses.frontend.items import MAX_ITEMS, MAX_REFERENCES
from penstock.parts.responses.frontend.part import stored_by
from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.http_client import error_of, get, post, send
from tests.frontend.live_server import LiveServer, made_server
from tests.frontend.parsing.test_tools import CALL, TEMPLATE, THOUGHT

TEXT = "Water runs down the pipe."
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture(scope="module")
def response_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.parts.responses.frontend.part.MAX_STORED", 4)
        with made_server(tmp_path_factory.mktemp("responses"), chat_template=TEMPLATE) as live:
            yield live


@pytest.fixture
def live(response_server: LiveServer) -> LiveServer:
    response_server.reset()
    return response_server


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def create(client: openai.OpenAI, given: Any = "Hello", **fields: Any) -> ClientResponse:
    response: ClientResponse = client.responses.create(model="test/model", input=given, **fields)
    return response


def stream(client: openai.OpenAI, given: Any = "Hello", **fields: Any) -> list[Any]:
    return list(client.responses.create(model="test/model", input=given, stream=True, **fields))


def prompt_text(live: LiveServer) -> str:
    return live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))


def without_ids(response: Any) -> Any:
    """A response's facts that do not differ from one request to the next."""
    found = json.loads(response.to_json())
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return {key: value for key, value in found.items() if key not in ("id", "created_at", "completed_at")}


def test_a_text(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    response = create(client, instructions="Be kind.", metadata={"a": "b"}, max_output_tokens=99)
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", "test/model")
    assert response.output_text == TEXT
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be kind.", {"a": "b"}, 99)
    assert response.usage is not None
    assert response.usage.output_tokens == len(live.tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert prompt_text(live) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_length_limit(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    response = create(client, max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert stream(client, max_output_tokens=2)[-1].type == "response.incomplete"


def test_events_of_a_text(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT, delay=0.002)
    events = stream(client)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert len(deltas) > 2
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0].response.status == "in_progress"
    assert events[-1].response.output_text == TEXT
    assert events[-1].response.id == events[0].response.id
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


@pytest.mark.parametrize("output", ["", TEXT, CALL, THOUGHT + TEXT, THOUGHT + "I look.\n" + CALL + CALL])
@pytest.mark.parametrize("per_step", [1, 9, 1000])
def test_streamed_and_whole_responses_are_equal(
    client: openai.OpenAI, live: LiveServer, output: str, per_step: int
) -> None:
    live.says(output, per_step=per_step)
    whole = create(client, tools=[WEATHER])
    events = stream(client, tools=[WEATHER])
    assert without_ids(events[-1].response) == without_ids(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in events[-1].response.output]
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        pieces = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        ends = [event for event in events if event.type == f"response.{kind}.done"]
        assert pieces == "".join(e.arguments if kind == "function_call_arguments" else e.text for e in ends)
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert added == list(range(len(whole.output)))


def test_calls_and_reasoning(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(THOUGHT + "I look.\n" + CALL)
    response = create(client, tools=[WEATHER])
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["Let me see."]
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Tromsø"}, "completed")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 5
    live.says("Cold.")
    history: list[Any] = [
        {"role": "user", "content": "Weather?"},
        *[item.to_dict() for item in response.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "-3"},
    ]
    assert create(client, history, tools=[WEATHER]).output_text == "Cold."
    text = prompt_text(live)
    assert '<think>Let me see.</think>I look.<tool_call>get_weather {"city": "Tromsø"}</tool_call><|im_end|>' in text
    assert f"<|im_start|>tool\n-3 ({call.call_id})<|im_end|>" in text


def test_a_response_goes_on_from_another(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    first = create(client, "One", instructions="Be kind.")
    second = create(client, [{"role": "user", "content": "Two"}], previous_response_id=first.id)
    third = stream(client, "Three", previous_response_id=second.id)[-1].response
    assert third.previous_response_id == second.id
    assert prompt_text(live) == (
        f"<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\n{TEXT}<|im_end|>\n"
        f"<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n{TEXT}<|im_end|>\n"
        "<|im_start|>user\nThree<|im_end|>\n<|im_start|>assistant\n"
    )
    assert client.responses.retrieve(third.id).output_text == TEXT


def test_stored_responses(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    first = create(client)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(first.id)
        assert caught.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"
    assert refused.value.param == "previous_response_id"
    unwanted = create(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unwanted.id)
    many = [create(client) for _ in range(5)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(many[0].id)
    assert client.responses.retrieve(many[1].id).id == many[1].id
    assert error_of(get(live, f"/v1/responses/{many[1].id}?stream=perhaps"), 400)["param"] == "stream"
    assert send(live, "DELETE", f"/v1/responses/{many[1].id}").json() == {
        "id": many[1].id,
        "object": "response",
        "deleted": True,
    }


def test_a_failure_after_the_first_byte(client: openai.OpenAI, live: LiveServer) -> None:
    live.says("Water runs", error="a device error", delay=0.02)
    kinds = []
    response_id = ""
    for event in client.responses.create(model="test/model", input="Hello", stream=True):
        kinds.append(event.type)
        if event.type == "response.created":
            response_id = event.response.id
        elif event.type == "response.failed":
            assert event.response.error is not None
            assert "a device error" in event.response.error.message
    assert kinds[-2:] == ["response.failed", "error"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "a b", "content": "x"}]}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "magic"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": ["x"]}]}, "input[0].type"),
    ({"n": 2}, "n"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"background": True, "store": False}, "background"),
    ({"truncation": "some"}, "truncation"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"safety_identifier": "x" * 513}, "safety_identifier"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input[0].id"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"include": ["made_up"]}, "include"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"metadata": {"a" * 65: "x"}}, "metadata"),
    ({"conversation": "c", "previous_response_id": "r"}, "conversation"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"prompt_logprobs": False}, "prompt_logprobs"),
    ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
def test_bad_requests(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert error_of(post(live, "/v1/responses", {"input": "Hello"} | fields), 400)["param"] == param


def test_a_stored_response_is_streamed_again(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(THOUGHT + "I look.\n" + CALL)
    first = create(client, tools=[WEATHER])
    events = list(client.responses.retrieve(first.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert events[-1].response.to_dict() == first.to_dict()
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in first.output]
    assert [e.delta for e in events if e.type == "response.output_text.delta"] == ["I look."]
    rest = list(client.responses.retrieve(first.id, stream=True, starting_after=4))
    assert [event.sequence_number for event in rest] == list(range(5, len(events)))


def test_input_items_in_pages(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    first = create(client, "One")
    given: list[Any] = [{"role": "user", "content": f"{number}", "unknown": [[]] * 10} for number in range(5)]
    given.append({"type": "function_call", "id": "fc_mine", "call_id": "c", "name": "f", "arguments": "{}"})
    given.append({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]})
    second = create(client, given, previous_response_id=first.id)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message"] * 5 + ["function_call", "function_call_output"]
    assert items[5].id == "fc_mine"
    assert len({item.id for item in items}) == 7
    assert not any("unknown" in item.to_dict() for item in items)
    newest = client.responses.input_items.list(second.id, limit=3)
    assert [item.id for item in newest.data] == [item.id for item in items[:-4:-1]]
    assert newest.has_more
    path = f"/v1/responses/{second.id}/input_items"
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        assert error_of(get(live, f"{path}?{query}"), 400)["param"] == param


def test_items_are_referred_to(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    first = create(client, "One")
    said: list[Any] = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "Two"}]
    create(client, said, store=False)
    assert prompt_text(live) == (
        f"<|im_start|>assistant\n{TEXT}<|im_end|>\n<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_items_of_a_conversation_are_referred_to(client: openai.OpenAI, live: LiveServer) -> None:
    made = client.conversations.create(items=[{"type": "message", "role": "user", "content": "One"}])
    [item] = client.conversations.items.list(made.id)
    assert item.id is not None
    create(client, [{"type": "item_reference", "id": item.id}], store=False)
    assert prompt_text(live) == "<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\n"
    client.conversations.delete(made.id)
    with pytest.raises(openai.BadRequestError, match="not found or deleted"):
        create(client, [{"type": "item_reference", "id": item.id}], store=False)


@pytest.mark.parametrize("most", [MAX_REFERENCES, MAX_ITEMS])
def test_references_are_counted_before_they_are_looked_up(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    asked: list[str] = []

    async def items(owner: str, item_ids: list[str]) -> dict[str, Any]:
        asked.extend(item_ids)
        return {}

    monkeypatch.setattr(stored_by(live.server.service).responses, "items", items)
    given = [{"type": "item_reference", "id": f"msg_{number}"} for number in range(most + 1)]
    error = error_of(post(live, "/v1/responses", {"input": given}), 400)
    assert (error["param"], f"{most} " in error["message"]) == ("input", True)
    assert not asked


def test_what_is_referred_to_is_no_larger_than_a_body(live: LiveServer) -> None:
    limit = live.server.service.max_body_bytes
    item = {"id": "fco_large", "type": "function_call_output", "call_id": "c", "output": "x" * (limit // 3)}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    with response_of(live, [call, item]):
        given = [call] + 3 * [{"type": "item_reference", "id": "fco_large"}]
        error = error_of(post(live, "/v1/responses", {"input": given}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        assert str(limit) in error["message"]


def test_tokens_are_counted_without_an_answer(live: LiveServer) -> None:
    body = {"input": "One", "instructions": "Be kind.", "tools": [WEATHER]}
    counted = post(live, "/v1/responses/input_tokens", body).json()
    assert counted["object"] == "response.input_tokens"
    assert not live.scheduler.added
    assert counted["input_tokens"] == post(live, "/v1/responses", body).json()["usage"]["input_tokens"]


def test_log_probabilities(client: openai.OpenAI, live: LiveServer) -> None:
    for output, expected in ((TEXT, TEXT), (THOUGHT + TEXT, TEXT), (THOUGHT + "I look.\n" + CALL, "I look.")):
        for per_step in (1, 7):
            live.says(output, per_step=per_step)
            fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [WEATHER]}
            whole = create(client, **fields)
            events = stream(client, **fields)
            assert without_ids(events[-1].response) == without_ids(whole)
            assert whole.top_logprobs == 2
            message: Any = next(item for item in whole.output if item.type == "message")
            [part] = message.content
            assert "".join(entry.token for entry in part.logprobs).startswith(expected)
            assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
            told = [entry for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
            assert [entry.token for entry in told] == [entry.token for entry in part.logprobs]


@pytest.mark.parametrize("per_step", [1, 4, 1000])
@pytest.mark.parametrize("stop", [[], ["ns down the wheel"], ["s down the p"]])
@pytest.mark.parametrize("output", ["", "\u6f22\U0001f642 runs down the pipe\U0001f642"])
def test_each_token_of_a_text_has_its_log_probability(
    client: openai.OpenAI, live: LiveServer, output: str, stop: list[str], per_step: int
) -> None:
    """Also those that are only a part of a character, and the stop token: as in chats."""
    live.says(output, per_step=per_step, delay=0.002)
    chat = client.chat.completions.create(
        model="test/model", messages=[{"role": "user", "content": "Hello"}], logprobs=True, top_logprobs=2, stop=stop
    ).to_dict()
    choices: Any = chat["choices"]
    [choice] = choices
    fields: Any = {"top_logprobs": 2, "extra_body": {"stop": stop}}
    whole = create(client, **fields)
    events = stream(client, **fields)
    assert without_ids(events[-1].response) == without_ids(whole)
    assert whole.output_text == choice["message"]["content"]
    [part] = whole.to_dict()["output"][0]["content"]  # type: ignore[index]
    assert part["logprobs"] == choice["logprobs"]["content"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    assert [entry.to_dict() for event in deltas for entry in event.logprobs] == part["logprobs"]


@pytest.mark.parametrize("per_step", [1, 4, 1000])
def test_tokens_belong_to_the_text_that_they_write(client: openai.OpenAI, live: LiveServer, per_step: int) -> None:
    said = "\u6f22\u5b57\U0001f642"
    thought, call = THOUGHT.replace("me", said), CALL.replace("Troms", said)
    live.says(thought + said + call, per_step=per_step)
    fields: Any = {"top_logprobs": 1, "tools": [WEATHER]}
    whole = create(client, **fields)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert without_ids(stream(client, **fields)[-1].response) == without_ids(whole)
    [part] = whole.to_dict()["output"][1]["content"]  # type: ignore[index]
    assert part["text"] == said
    written = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
    assert written == said.encode()


def test_what_does_not_fit_goes_from_the_beginning(client: openai.OpenAI, live: LiveServer) -> None:
    long: list[Any] = []
    for number in range(20):
        long += [{"role": "user", "content": f"{number} " * 20}, {"role": "assistant", "content": f"answer {number}"}]
    long.append({"role": "user", "content": "the last"})
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, long, instructions="Be kind.")
    assert refused.value.code == "context_length_exceeded"
    response = create(client, long, instructions="Be kind.", truncation="auto", max_output_tokens=16)
    assert response.truncation == "auto"
    text = prompt_text(live)
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_start|>user\nthe last<|im_end|>\n<|im_start|>assistant\n")
    assert "answer 19" in text
    assert "answer 0" not in text
    assert len(prompt_ids(live.scheduler.added[-1])) + 16 <= 512
    most = len(prompt_ids(live.scheduler.added[-1]))
    assert most > 300  # no more is cut than must be
    with pytest.raises(openai.BadRequestError):
        create(client, "x " * 2000, truncation="auto")


def test_what_a_coding_agent_sends(live: LiveServer) -> None:
    """Tools that the server would have to run are left out; the rest works."""
    tools = [
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        WEATHER,
        {"type": "web_search"},
        {"type": "local_shell"},
    ]
    body = {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        "tools": tools,
        "tool_choice": {"type": "web_search"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "detailed"},
        "prompt_cache_key": "abc",
        "safety_identifier": "someone",
        "service_tier": "auto",
        "text": {"verbosity": "low"},
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
    }
    answer = post(live, "/v1/responses", body)
    assert answer.status == 200, answer.text
    found = answer.json()
    assert found["tools"][0] == {**tools[0], "description": None}
    assert [tool["name"] for tool in found["tools"]] == ["apply_patch", "get_weather"]
    assert (found["prompt_cache_key"], found["safety_identifier"]) == ("abc", "someone")
    assert (found["service_tier"], found["max_tool_calls"], found["tool_choice"]) == ("default", 3, "auto")
    warning = answer.headers["x-penstock-warning"]
    for told in ("grammar of 'apply_patch'", "tools[2]", "tools[3]", "tool_choice", "verbosity"):
        assert told in warning
    assert "apply_patch" in prompt_text(live)


def test_a_conversation_is_no_larger_than_a_body(live: LiveServer) -> None:
    live.says(TEXT)
    limit = live.server.service.max_body_bytes
    large = {"type": "function_call_output", "call_id": "c", "output": "x" * (limit // 2)}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    kept = {"role": "user", "content": "Hello"}
    with response_of(live, [kept, call, large]) as first:
        error = error_of(post(live, "/v1/responses", {"input": [large], "previous_response_id": first}), 400)
        assert error["code"] == "context_length_exceeded"
        assert str(limit) in error["message"]


def test_a_stored_conversation_is_no_larger_than_a_body(client: openai.OpenAI, live: LiveServer) -> None:
    limit = live.server.service.max_body_bytes
    large: Any = {"type": "function_call_output", "call_id": "c", "output": "x" * (limit // 2)}
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    made = client.conversations.create(items=[call, large])
    client.conversations.items.create(made.id, items=[large])
    body = {"input": "Hello", "conversation": made.id}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        error = error_of(post(live, path, body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "conversation")
        assert str(limit) in error["message"]
    client.conversations.delete(made.id)
    assert error_of(post(live, "/v1/responses", body), 404)["code"] == "conversation_not_found"


@contextmanager
def response_of(live: LiveServer, items: list[dict[str, Any]]) -> Iterator[str]:
    """The id of a stored response with these items in its conversation, however they came there."""
    store = stored_by(live.server.service).responses
    asyncio.run_coroutine_threadsafe(
        store.put("", "resp_large", b"{}", items, num_before=0, num_inputs=len(items)), live.loop
    ).result(10)
    yield "resp_large"
    send(live, "DELETE", "/v1/responses/resp_large")
