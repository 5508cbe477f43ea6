"""Loops of agents by the official clients, on a small trained model whose template knows no tools.

Calls are forced, so that even a model of this size makes them; all is greedy, so that streams say what whole answers
say. What is looked at is the protocol: names, ids, arguments that match their schema, results that are taken back, and
that the loop ends.
"""

import asyncio
import json
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.e2e.servers import Server
from tests.real.fetched import only_real

pytestmark = [only_real, pytest.mark.asyncio(loop_scope="session")]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Bergen", "Tromsø"], "description": "The city."},
        "days": {"type": "integer", "minimum": 1, "maximum": 14, "description": "How many days from now."},
        "unit": {"anyOf": [{"const": "celsius"}, {"type": "null"}]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "get_time": NOW}
DESCRIPTIONS = {"get_weather": "Tells the weather of a city.", "get_time": "Tells the time."}
QUESTION = "What will the weather be in Bergen tomorrow?"
OPEN_QUESTION = f"{QUESTION} Use a tool."
RESULT = '{"weather": "rain", "degrees": 9}'
MOST_ROUNDS = 4
FORMER_CITIES = ("Oslo", "Bergen")
FORMER_ANSWER = "Rain, 9 degrees."


def forecast(city: str) -> dict[str, Any]:
    """Arguments of a call."""
    return {"city": city, "days": 1, "unit": "celsius"}


def check_call(name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """The arguments, which match the schema of the tool."""
    given: dict[str, Any] = json.loads(arguments) if isinstance(arguments, str) else arguments
    jsonschema.validate(given, SCHEMAS[name])
    return given


# --- chats -------------------------------------------------------------------------------------


def function(name: str) -> dict[str, Any]:
    described = {"name": name, "description": DESCRIPTIONS[name], "parameters": SCHEMAS[name]}
    return {"type": "function", "function": described}


def loop_by_chat(client: openai.OpenAI) -> None:
    fields: Any = {"model": "m", "temperature": 0, "max_tokens": 200, "tools": [*map(function, SCHEMAS)]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    named = {"type": "function", "function": {"name": "get_weather"}}
    ids = set()
    for choice, names in ((named, {"get_weather"}), ("required", {*SCHEMAS})):
        asked = fields | {"messages": messages, "tool_choice": choice, "parallel_tool_calls": False}
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert whole.finish_reason == streamed.finish_reason == "tool_calls"
        [call], [again] = whole.message.tool_calls, streamed.message.tool_calls or []
        assert call.function.name in names
        assert (call.function.name, call.function.arguments) == (again.function.name, again.function.arguments)
        check_call(call.function.name, call.function.arguments)
        ids |= {call.id, again.id}
        messages.append(whole.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    assert len(ids) == 4
    asked = fields | {"messages": messages, "tool_choice": "none"}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.message.content
    assert not answer.message.tool_calls
    pieces = client.chat.completions.create(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == answer.message.content


def chat_as_the_model_likes(client: openai.OpenAI) -> None:
    """With `auto` a model may say or call what it likes: whatever it calls is well-formed, and is taken back."""
    messages: list[Any] = [{"role": "user", "content": OPEN_QUESTION}]
    for _ in range(MOST_ROUNDS):
        asked: Any = {"model": "m", "temperature": 0, "max_tokens": 120, "messages": messages}
        asked["tools"] = [*map(function, SCHEMAS)]
        answer = client.chat.completions.create(**asked).choices[0]
        messages.append(answer.message.model_dump(exclude_none=True))
        calls = answer.message.tool_calls or []
        assert bool(calls) == (answer.finish_reason == "tool_calls")
        for call in calls:
            assert call.type == "function"
            assert call.function.name in SCHEMAS
            assert isinstance(json.loads(call.function.arguments), dict)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        if not calls:
            assert answer.message.content
            return
    last = client.chat.completions.create(model="m", max_tokens=20, temperature=0, messages=messages)
    assert last.choices[0].finish_reason in ("stop", "length")


# --- responses ---------------------------------------------------------------------------------


def loop_by_responses(client: openai.OpenAI) -> None:
    tools = [{"type": "function", **function(name)["function"], "strict": True} for name in SCHEMAS]
    fields: Any = {"model": "m", "temperature": 0, "max_output_tokens": 200, "tools": tools}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    named = {"type": "function", "name": "get_weather"}
    for choice in (named, "required"):
        asked = fields | {"input": items, "tool_choice": choice, "parallel_tool_calls": False}
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            streamed = stream.get_final_response()
        [call] = [item for item in whole.output if item.type == "function_call"]
        [again] = [item for item in streamed.output if item.type == "function_call"]
        assert whole.status == streamed.status == "completed"
        assert (call.name, call.arguments) == (again.name, again.arguments)
        assert len({call.id, call.call_id, again.id, again.call_id}) == 4
        check_call(call.name, call.arguments)
        items += [item.model_dump(exclude_none=True) for item in whole.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
    answer = client.responses.create(**fields | {"input": items, "tool_choice": "none"})
    assert answer.output_text
    assert {item.type for item in answer.output} == {"message"}
    begun = client.responses.create(**fields | {"input": QUESTION, "tool_choice": named})
    [call] = [item for item in begun.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    goes_on = fields | {"input": [output], "previous_response_id": begun.id, "tool_choice": "none"}
    assert client.responses.create(**goes_on).output_text


def response_as_the_model_likes(client: openai.OpenAI) -> None:
    """The same on responses, whole and streamed, after two calls that a model of this size imitates."""
    tools = [{"type": "function", **function(name)["function"], "strict": True} for name in SCHEMAS]
    items: list[Any] = []
    for city in FORMER_CITIES:
        called = {
            "type": "function_call",
            "name": "get_weather",
            "call_id": city,
            "arguments": json.dumps(forecast(city)),
        }
        items.append({"role": "user", "content": f"What will the weather be in {city} tomorrow?"})
        items += [called, {"type": "function_call_output", "call_id": city, "output": RESULT}]
        items.append({"role": "assistant", "content": FORMER_ANSWER})
    items.append({"role": "user", "content": "What will the weather be in Tromsø tomorrow?"})
    num_calls = 0
    for _ in range(MOST_ROUNDS):
        asked: Any = {"model": "m", "temperature": 0, "max_output_tokens": 120, "input": items, "tools": tools}
        whole = client.responses.create(**asked)
        *_, end = client.responses.create(**asked, stream=True)  # the client's own end is a completed response only
        streamed = end.response
        assert [item.type for item in whole.output] == [item.type for item in streamed.output]
        assert whole.output_text == streamed.output_text
        assert whole.status == streamed.status
        assert whole.status in ("completed", "incomplete")
        items += [item.model_dump(exclude_none=True) for item in whole.output]
        calls = [item for item in whole.output if item.type == "function_call"]
        again = [item for item in streamed.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in calls] == [(call.name, call.arguments) for call in again]
        num_calls += len(calls)
        for call in calls:
            check_call(call.name, call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
        if not calls:
            assert whole.output_text
            break
    assert num_calls
    last = client.responses.create(model="m", max_output_tokens=20, temperature=0, input=items)
    assert last.status in ("completed", "incomplete")


# --- messages ----------------------------------------------------------------------------------


def loop_by_messages(client: anthropic.Anthropic) -> None:
    tools = [{"name": name, "description": DESCRIPTIONS[name], "input_schema": SCHEMAS[name]} for name in SCHEMAS]
    fields: Any = {"model": "m", "max_tokens": 200, "tools": tools, "extra_body": {"temperature": 0}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    ids = set()
    for choice in ({"type": "tool", "name": "get_weather"}, {"type": "any"}):
        asked = fields | {"messages": messages, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert whole.stop_reason == streamed.stop_reason == "tool_use"
        [call] = [block for block in whole.content if block.type == "tool_use"]
        [again] = [block for block in streamed.content if block.type == "tool_use"]
        assert (call.name, call.input) == (again.name, again.input)
        check_call(call.name, call.input)
        ids |= {call.id, again.id}
        messages.append({"role": "assistant", "content": [block.to_dict() for block in whole.content]})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]
        messages.append({"role": "user", "content": results})
    assert len(ids) == 4
    answer = client.messages.create(**fields | {"messages": messages, "tool_choice": {"type": "none"}})
    assert {block.type for block in answer.content} == {"text"}
    assert answer.stop_reason in ("end_turn", "max_tokens")


def message_as_the_model_likes(client: anthropic.Anthropic) -> None:
    """The same on messages, whole and streamed, after the same two calls."""
    tools = [{"name": name, "description": DESCRIPTIONS[name], "input_schema": SCHEMAS[name]} for name in SCHEMAS]
    messages: list[Any] = []
    for city in FORMER_CITIES:
        called = {"type": "tool_use", "id": city, "name": "get_weather", "input": forecast(city)}
        messages.append({"role": "user", "content": f"What will the weather be in {city} tomorrow?"})
        messages.append({"role": "assistant", "content": [called]})
        messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": city, "content": RESULT}]})
        messages.append({"role": "assistant", "content": FORMER_ANSWER})
    messages.append({"role": "user", "content": "What will the weather be in Tromsø tomorrow?"})
    num_calls = 0
    for _ in range(MOST_ROUNDS):
        asked: Any = {"model": "m", "max_tokens": 120, "messages": messages, "extra_body": {"temperature": 0}}
        asked |= {"tools": tools, "tool_choice": {"type": "auto"}}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert said_by(whole) == said_by(streamed)
        assert whole.stop_reason == streamed.stop_reason
        messages.append({"role": "assistant", "content": [block.to_dict() for block in whole.content]})
        calls = [block for block in whole.content if block.type == "tool_use"]
        assert bool(calls) == (whole.stop_reason == "tool_use")
        num_calls += len(calls)
        results = []
        for call in calls:
            assert call.name in SCHEMAS
            assert isinstance(call.input, dict)
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": RESULT})
        if not calls:
            assert any(block.type == "text" and block.text for block in whole.content)
            messages.append({"role": "user", "content": QUESTION})
            break
        messages.append({"role": "user", "content": results})
    assert num_calls
    last = client.messages.create(model="m", max_tokens=20, messages=messages)
    assert last.stop_reason in ("end_turn", "max_tokens")


def said_by(message: anthropic.types.Message) -> list[tuple[str, Any]]:
    """What a message's blocks hold, without the ids of calls, which are made up."""
    said: list[tuple[str, Any]] = []
    for block in message.content:
        said.append(("text", block.text) if block.type == "text" else (block.type, getattr(block, "input", None)))
    return said


async def test_the_openai_client(chat_server: Server) -> None:
    def work() -> None:
        with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            loop_by_chat(client)
            chat_as_the_model_likes(client)
            loop_by_responses(client)
            response_as_the_model_likes(client)

    await asyncio.to_thread(work)


async def test_the_anthropic_client(chat_server: Server) -> None:
    def work() -> None:
        with anthropic.Anthropic(base_url=chat_server.url, auth_token="none", max_retries=0, timeout=120) as client:
            loop_by_messages(client)
            message_as_the_model_likes(client)

    await asyncio.to_thread(work)
