"""Chats with `functions`, as they were before tools: what the model sees, and what the client gets."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.http_client import HELLO, chat, error_of, post
from tests.frontend.live_server import LiveServer, made_server
from tests.frontend.parsing.test_tools import CALL, SPECIAL, TEMPLATE, WEATHER

FUNCTION: dict[str, Any] = WEATHER["function"]
ARGUMENTS = '{"city": "Tromsø"}'
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?", "function_call": None},
    {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": ARGUMENTS}},
    {"role": "function", "name": "get_weather", "content": "Sunny"},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(scope="module")
def function_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with made_server(tmp_path_factory.mktemp("functions"), chat_template=TEMPLATE, special_tokens=SPECIAL) as live:
        yield live


@pytest.fixture
def live(function_server: LiveServer) -> LiveServer:
    function_server.reset()
    return function_server


def prompt(live: LiveServer) -> str:
    return live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))


@pytest.mark.parametrize("per_step", [1, 7, 1000])
def test_a_call_is_answered_in_its_old_form(live: LiveServer, per_step: int) -> None:
    live.says(f"I look.\n{CALL}\n{CALL}", per_step=per_step)  # the second one has no place in the answer
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        fields: Any = {"model": "test/model", "messages": HELLO, "functions": [FUNCTION]}
        [choice] = client.chat.completions.create(**fields).choices
        chunks = list(client.chat.completions.create(stream=True, **fields))
    assert choice.finish_reason == "function_call"
    assert choice.message.content == "I look."
    assert choice.message.tool_calls is None
    assert choice.message.function_call is not None
    assert choice.message.function_call.name == "get_weather"
    assert choice.message.function_call.arguments == ARGUMENTS
    calls = [chunk.choices[0].delta.function_call for chunk in chunks]
    assert [call.name for call in calls if call and call.name] == ["get_weather"]
    assert "".join(call.arguments or "" for call in calls if call) == ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "function_call"
    assert all(chunk.choices[0].delta.tool_calls is None for chunk in chunks)


def test_the_model_sees_tools(live: LiveServer) -> None:
    assert chat(live, functions=[FUNCTION]).status == 200
    shown = prompt(live)
    assert chat(live, tools=[WEATHER]).status == 200
    assert prompt(live) == shown
    assert chat(live, functions=[FUNCTION], function_call="none").status == 200
    assert "<tools>" not in prompt(live)
    live.says(CALL)
    forced = chat(live, functions=[FUNCTION], function_call={"name": "get_weather"}).json()["choices"][0]
    assert forced["message"]["function_call"]["name"] == "get_weather"
    assert live.scheduler.added[-1].sampling.grammar


def test_past_calls_and_results_are_those_of_tools(live: LiveServer) -> None:
    assert chat(live, messages=HISTORY, functions=[FUNCTION]).status == 200
    shown = prompt(live)
    call = {"id": "call00001", "type": "function", "function": HISTORY[1]["function_call"]}
    messages = [
        HISTORY[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "Sunny"},
        HISTORY[3],
    ]
    assert chat(live, messages=messages, tools=[WEATHER]).status == 200
    assert prompt(live) == shown
    assert "Sunny (call00001)" in shown
    tokens = post(live, "/tokenize", {"messages": HISTORY, "tools": [WEATHER]}).json()["tokens"]
    assert live.tokenizer.decode(tokens) == shown


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"functions": [{"parameters": {}}]}, "functions[0].name"),
    ({"functions": [FUNCTION, FUNCTION]}, "functions"),
    ({"functions": [FUNCTION], "function_call": {"name": "other"}}, "function_call"),
    ({"functions": [FUNCTION], "function_call": "always"}, "function_call"),
    ({"functions": [FUNCTION], "function_call": {}}, "function_call"),
    ({"function_call": {"name": "get_weather"}}, "function_call"),
    ({"function_call": "always"}, "function_call"),
    ({"functions": [FUNCTION], "tools": [WEATHER]}, "functions"),
    ({"functions": {"name": "f"}}, "functions"),
    ({"messages": [*HELLO, {"role": "assistant", "function_call": {"name": "f"}}]}, "messages[1].function_call"),
    ({"messages": [*HELLO, {"role": "assistant", "function_call": "f"}]}, "messages[1].function_call"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: json.dumps(value)[:40])
def test_what_is_wrong_is_named_as_it_was_sent(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    error = error_of(chat(live, **fields), 400)
    assert error["param"] == param
    assert "tool_choice" not in error["message"]


def test_what_asks_for_nothing_goes_with_tools(live: LiveServer) -> None:
    assert chat(live, functions=[], function_call="auto", tools=[WEATHER]).status == 200
    assert "<tools>" in prompt(live)
