"""The seven conformance cases of the Open Responses specification (openresponses.org), written anew from it.

The one with an image is beside the other tests of images.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.frontend.http_client import post
from tests.frontend.live_server import LiveServer, made_server
from tests.frontend.parsing.test_tools import CALL, TEMPLATE

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city, such as Oslo"}},
        "required": ["location"],
    },
}

Check = Callable[[Any], bool]


def _is(*kinds: type) -> Check:
    return lambda value: type(value) in kinds


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _in(*values: Any) -> Check:
    return lambda value: value in values


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _object(**fields: Check) -> Check:
    """An object that has all of these fields, right, and perhaps others."""
    return lambda value: (
        isinstance(value, dict) and all(name in value and check(value[name]) for name, check in fields.items())
    )


TEXT = _object(type=_in("output_text"), text=_is(str), annotations=_in([]), logprobs=_is(list))
STATUS = _in("in_progress", "completed", "incomplete")
ITEMS: dict[str, Check] = {
    "message": _object(id=_is(str), status=STATUS, role=_in("assistant"), content=_list_of(TEXT)),
    "function_call": _object(id=_is(str), call_id=_is(str), name=_is(str), arguments=_is(str), status=STATUS),
    "reasoning": _object(id=_is(str), summary=_is(list), content=_is(list)),
}
TOOL = _object(
    type=_in("function"),
    name=_is(str),
    description=_or_null(_is(str)),
    parameters=_or_null(_is(dict)),
    strict=_or_null(_is(bool)),
)
USAGE = _object(
    input_tokens=_is(int),
    output_tokens=_is(int),
    total_tokens=_is(int),
    input_tokens_details=_object(cached_tokens=_is(int)),
    output_tokens_details=_object(reasoning_tokens=_is(int)),
)
RESPONSE: dict[str, Check] = {
    "id": _is(str),
    "object": _in("response"),
    "created_at": _is(int),
    "completed_at": _or_null(_is(int)),
    "status": _in("in_progress", "completed", "incomplete", "failed"),
    "incomplete_details": _or_null(_object(reason=_is(str))),
    "model": _is(str),
    "previous_response_id": _or_null(_is(str)),
    "instructions": _or_null(_is(str)),
    "output": _list_of(lambda item: ITEMS[item["type"]](item)),
    "error": _or_null(_object(code=_is(str), message=_is(str))),
    "tools": _list_of(TOOL),
    "tool_choice": _is(str, dict),
    "truncation": _in("auto", "disabled"),
    "parallel_tool_calls": _is(bool),
    "text": _object(format=_object(type=_in("text", "json_object", "json_schema")), verbosity=_is(str)),
    "top_p": _is(int, float),
    "presence_penalty": _is(int, float),
    "frequency_penalty": _is(int, float),
    "top_logprobs": _is(int),
    "temperature": _is(int, float),
    "reasoning": _or_null(_object(effort=_or_null(_is(str)), summary=_or_null(_is(str)))),
    "user": _or_null(_is(str)),
    "usage": _or_null(USAGE),
    "max_output_tokens": _or_null(_is(int)),
    "max_tool_calls": _or_null(_is(int)),
    "store": _is(bool),
    "background": _is(bool),
    "service_tier": _is(str),
    "metadata": _is(dict),
    "safety_identifier": _or_null(_is(str)),
    "prompt_cache_key": _or_null(_is(str)),
}
"""Every field that the specification requires of a response."""

_IN_ITEM: dict[str, Check] = {"item_id": _is(str), "output_index": _is(int)}
_IN_PART: dict[str, Check] = {**_IN_ITEM, "content_index": _is(int)}
_OF_RESPONSE: dict[str, Check] = {"response": lambda response: not wrong_fields(response)}
_ITEM: dict[str, Check] = {"output_index": _is(int), "item": lambda item: ITEMS[item["type"]](item)}
EVENTS: dict[str, dict[str, Check]] = {
    "response.created": _OF_RESPONSE,
    "response.in_progress": _OF_RESPONSE,
    "response.completed": _OF_RESPONSE,
    "response.output_item.added": _ITEM,
    "response.output_item.done": _ITEM,
    "response.content_part.added": {**_IN_PART, "part": TEXT},
    "response.content_part.done": {**_IN_PART, "part": TEXT},
    "response.output_text.delta": {**_IN_PART, "delta": _is(str), "logprobs": _is(list)},
    "response.output_text.done": {**_IN_PART, "text": _is(str), "logprobs": _is(list)},
    "response.function_call_arguments.delta": {**_IN_ITEM, "delta": _is(str)},
    "response.function_call_arguments.done": {**_IN_ITEM, "arguments": _is(str)},
}


def wrong_fields(response: dict[str, Any]) -> list[str]:
    """The fields that a response lacks, or has wrong."""
    return [name for name, check in RESPONSE.items() if name not in response or not check(response[name])]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with made_server(tmp_path_factory.mktemp("open-responses"), chat_template=TEMPLATE) as live:
        yield live


def ask(live: LiveServer, *messages: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    """A completed response, checked."""
    given = [{"type": "message", "role": role, "content": content} for role, content in messages]
    answer = post(live, "/v1/responses", {"model": "test/model", "input": given, **fields})
    assert answer.status == 200, answer.text
    response: dict[str, Any] = answer.json()
    assert not wrong_fields(response)
    assert response["status"] == "completed"
    assert response["output"]
    return response


def ask_streaming(live: LiveServer, content: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a completed response, each checked."""
    given = [{"type": "message", "role": "user", "content": content}]
    answer = post(live, "/v1/responses", {"model": "test/model", "input": given, "stream": True, **fields})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events: list[dict[str, Any]] = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        wrong = [field for field, check in EVENTS[event["type"]].items() if not check(event.get(field))]
        assert not wrong, (event["type"], wrong)
        assert event["sequence_number"] == len(events)
        events.append(event)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["status"] == "completed"
    return events


def test_basic_text(live: LiveServer) -> None:
    live.says("Hello there friend.")
    response = ask(live, ("user", "Say hello in exactly 3 words."))
    assert response["output"][0]["content"][0]["text"] == "Hello there friend."
    assert response["completed_at"] >= response["created_at"]


def test_streaming(live: LiveServer) -> None:
    live.says("1, 2, 3, 4, 5")
    events = ask_streaming(live, "Count from 1 to 5.")
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == "1, 2, 3, 4, 5"


def test_system_prompt(live: LiveServer) -> None:
    live.says("Ahoy!")
    ask(live, ("system", "You are a pirate."), ("user", "Say hello."))


def test_tool_calling(live: LiveServer) -> None:
    live.says(CALL)
    response = ask(live, ("user", "What is the weather in Oslo?"), tools=[WEATHER])
    assert [item["type"] for item in response["output"]] == ["function_call"]


def test_tool_calling_streamed(live: LiveServer) -> None:
    live.says(CALL)
    events = ask_streaming(live, "What is the weather in Oslo?", tools=[WEATHER])
    kinds = [event["type"] for event in events]
    for kind in ("response.output_item.added", "response.output_item.done"):
        assert events[kinds.index(kind)]["item"]["type"] == "function_call"
    assert "response.function_call_arguments.delta" in kinds
    assert "response.function_call_arguments.done" in kinds


def test_several_turns(live: LiveServer) -> None:
    live.says("Your name is Alice.")
    ask(
        live,
        ("user", "My name is Alice."),
        ("assistant", "Hello Alice! How can I help you today?"),
        ("user", "What is my name?"),
    )
