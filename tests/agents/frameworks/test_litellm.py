"""LiteLLM as a client: a loop by hand, as its users write it."""

import json
from typing import Any

import litellm
import pytest

from tests.agents.report_type import Report
from tests.agents.script import ANSWER, AS_OBJECT, NEXT_ANSWER, NEXT_QUESTION, QUESTION, REPORT
from tests.agents.scripted_server import MODEL
from tests.agents.test_scripted import KNOWN, tool


@pytest.fixture(params=["openai", "hosted_vllm"])
def where(url: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"model": f"{request.param}/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}


def loop(messages: list[Any], *, stream: bool, **fields: Any) -> tuple[str, list[str]]:
    called: list[str] = []
    for _ in range(5):
        answer = litellm.completion(messages=messages, stream=stream, **fields)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content, called
        for call in message.tool_calls:
            called.append(call.function.name)
            result = KNOWN[call.function.name][json.loads(call.function.arguments)["city"]]
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
    raise AssertionError(f"no end: {messages}")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_loop_of_two_turns(where: dict[str, Any], stream: bool, strict: bool) -> None:
    tools = [tool("get_weather", strict=strict), tool("get_time", strict=strict)]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields = {"tools": tools, "reasoning_effort": "low", "drop_params": True}
    assert loop(messages, stream=stream, **fields, **where) == (ANSWER, ["get_weather", "get_time"])
    messages.append({"role": "user", "content": NEXT_QUESTION})
    assert loop(messages, stream=stream, **fields, **where) == (NEXT_ANSWER, ["get_weather", "get_time"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_output_type(where: dict[str, Any], stream: bool) -> None:
    tools = [tool("get_weather", strict=True), tool("get_time", strict=True)]
    messages: list[Any] = [{"role": "user", "content": f"{QUESTION} {AS_OBJECT}"}]
    text, called = loop(messages, stream=stream, tools=tools, response_format=Report, **where)
    assert (json.loads(text), called) == (REPORT, ["get_weather", "get_time"])
