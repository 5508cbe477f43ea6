"""What a coding agent in a terminal sends to /v1/responses: functions beside a custom tool and others, nothing stored,
reasoning handed back, everything streamed."""

import json
from typing import Any

import openai
import pytest

from tests.agents.conftest import ServerOf
from tests.agents.script import (
    ANSWER,
    EDIT_ANSWER,
    EDIT_QUESTION,
    EDITED,
    NEXT_ANSWER,
    NEXT_QUESTION,
    PATCH,
    QUESTION,
    TIME,
    WEATHER,
)
from tests.agents.scripted_server import MODEL

KNOWN = {"get_weather": WEATHER, "get_time": TIME}
PATCH_GRAMMAR = """start: "*** Begin Patch" LF add_hunk+ "*** End Patch" LF?
add_hunk: "*** Add File: " /(.+)/ LF add_line+
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""


def function(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "description": "Knows.", "strict": False, "parameters": parameters}


PAYLOAD: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent. Be brief.",
    "tools": [
        function("get_weather"),
        function("get_time"),
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0197-session",
    "text": {"verbosity": "medium"},
    "service_tier": "auto",
    "extra_body": {"client_metadata": {"x-agent-installation-id": "0"}},
}


@pytest.fixture
def url(server_of: ServerOf) -> str:
    return server_of("qwen")


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def turn(client: Any, items: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Answer calls until there is a text; the items grow as the agent keeps them."""
    called: list[str] = []
    for _ in range(6):
        done: list[Any] = []
        with client.responses.create(**PAYLOAD, input=items, stream=True) as stream:
            for event in stream:
                if event.type == "response.output_item.done":
                    done.append(event.item.model_dump(exclude_none=True))
            assert event.type == "response.completed"
        for item in done:
            if item["type"] == "reasoning":
                item = {"type": "reasoning", "summary": [], "content": item["content"], "encrypted_content": None}
            items.append({key: value for key, value in item.items() if key not in ("id", "status")})
        calls = [item for item in done if item["type"] == "function_call"]
        if not calls:
            return "".join(
                part["text"] for item in done if item["type"] == "message" for part in item["content"]
            ), called
        for call in calls:
            called.append(call["name"])
            result = KNOWN[call["name"]][json.loads(call["arguments"])["city"]]
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
    raise AssertionError(f"no end: {items}")


def test_two_turns(url: str) -> None:
    environment = user("<environment_context><cwd>/src</cwd></environment_context>")
    rules = {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "Ask before you push."}],
    }
    items = [rules, environment, user(QUESTION)]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert turn(client, items) == (ANSWER, ["get_weather", "get_time"])
        items.append(user(NEXT_QUESTION))
        text, called = turn(client, items)
    assert text == NEXT_ANSWER
    assert called[0] == "get_weather"


@pytest.mark.parametrize("family", ["qwen", "llama", "mistral"])
def test_a_patch(server_of: ServerOf, family: str) -> None:
    """A custom tool: the model is held to its grammar, the client gets a text, and the model sees its call again."""
    items: list[Any] = [user(EDIT_QUESTION)]
    with openai.OpenAI(base_url=f"{server_of(family)}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for choice in ("auto", {"type": "custom", "name": "apply_patch"}):
            events: list[Any] = list(
                client.responses.create(**(PAYLOAD | {"tool_choice": choice}), input=items, stream=True)
            )
            done = [event.item for event in events if event.type == "response.output_item.done"]
            [call] = [item for item in done if item.type == "custom_tool_call"]
            assert (call.name, call.input) == ("apply_patch", PATCH)
            deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
            assert "".join(deltas) == PATCH
            assert len(deltas) > 3
        assert any(event.type == "response.reasoning_summary_text.done" for event in events) == (family == "qwen")
        items += [item.model_dump(exclude_none=True, exclude={"id", "status"}) for item in done]
        items.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": EDITED})
        assert turn(client, items) == (EDIT_ANSWER, [])


@pytest.mark.parametrize("kind", ["web_search", "local_shell"])
def test_what_is_left_out_is_told(url: str, kind: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        ask: Any = client.responses.with_raw_response.create
        answer = ask(**PAYLOAD, input=[user("Hello")])
        assert f"type {kind!r}" in answer.headers["x-penstock-warning"]
        assert answer.parse().output_text == "Good day."
