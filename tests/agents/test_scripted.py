"""The scripted model behind a real server: whole loops, streamed and not, with OpenAI's client."""

import json
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.agents.script import (
    ANSWER,
    AS_OBJECT,
    NEXT_ANSWER,
    NEXT_QUESTION,
    QUESTION,
    REPORT,
    TIME,
    WEATHER,
)
from tests.agents.scripted_server import MODEL

STRINGS = {"type": "array", "items": {"type": "string"}}
REPORT_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}, "notes": STRINGS},
    "required": ["city", "degrees", "notes"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT_SCHEMA, "strict": True}}
KNOWN = {"get_weather": WEATHER, "get_time": TIME}


def tool(name: str, *, strict: bool) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def ask(client: openai.OpenAI, messages: list[Any], *, stream: bool, **fields: Any) -> Any:
    if not stream:
        return client.chat.completions.create(model=MODEL, messages=messages, **fields).choices[0].message
    state: Any = ChatCompletionStreamState(response_format=openai.omit)
    for chunk in client.chat.completions.create(model=MODEL, messages=messages, stream=True, **fields):
        state.handle_chunk(chunk)
    return state.get_final_completion().choices[0].message


def loop(client: openai.OpenAI, messages: list[Any], *, stream: bool, **fields: Any) -> tuple[str, list[str]]:
    """Ask until there is a text: it, and the tools called on the way. The messages grow."""
    called: list[str] = []
    for _ in range(5):
        message = ask(client, messages, stream=stream, **fields)
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content, called
        for call in message.tool_calls:
            called.append(call.function.name)
            result = KNOWN[call.function.name][json.loads(call.function.arguments)["city"]]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError(f"no end: {messages}")


@pytest.fixture
def client(url: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_loop_of_two_turns(client: openai.OpenAI, stream: bool, strict: bool) -> None:
    tools = [tool("get_weather", strict=strict), tool("get_time", strict=strict)]
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    text, called = loop(client, messages, stream=stream, tools=tools)
    assert (text, called) == (ANSWER, ["get_weather", "get_time"])
    messages.append({"role": "user", "content": NEXT_QUESTION})
    text, called = loop(client, messages, stream=stream, tools=tools)
    assert (text, called) == (NEXT_ANSWER, ["get_weather", "get_time"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_loop_with_an_output_form(client: openai.OpenAI, stream: bool, strict: bool) -> None:
    tools = [tool("get_weather", strict=strict), tool("get_time", strict=strict)]
    messages: list[Any] = [{"role": "user", "content": f"{QUESTION} {AS_OBJECT}"}]
    text, called = loop(client, messages, stream=stream, tools=tools, response_format=FORM)
    assert (json.loads(text), called) == (REPORT, ["get_weather", "get_time"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_a_forced_call(client: openai.OpenAI, choice: Any) -> None:
    message = ask(
        client,
        [{"role": "user", "content": QUESTION}],
        stream=False,
        tools=[tool("get_weather", strict=False), tool("get_time", strict=False)],
        tool_choice=choice,
    )
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Ulm"})


def test_a_script_that_breaks_the_form_is_held_to_it(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "yes", "schema": {"enum": ["yes", "no"]}}}
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    assert ask(client, messages, stream=False).content == "Good day."
    assert json.loads(ask(client, messages, stream=False, response_format=form).content) in ("yes", "no")
