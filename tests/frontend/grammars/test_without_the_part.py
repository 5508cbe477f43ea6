"""A server without the part for grammars: what must match is refused in one sentence, and calls are read as before."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.frontend.http_client import chat, error_of, post
from tests.frontend.live_server import LiveServer, made_server
from tests.parts.distribution import hidden

NAMED = "get_weather"
FUNCTION = {"name": NAMED, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
CUSTOM = {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
CHOICE = {"type": "function", "function": {"name": NAMED}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools }}<tool_call>{% endif %}"


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with hidden("grammars"), made_server(tmp_path_factory.mktemp("without"), chat_template=TEMPLATE) as live:
        yield live


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format.schema"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": CHOICE}, "tool_choice"),
        ({"tools": [STRICT]}, "tools"),
        ({"tools": [{"type": "custom", "custom": CUSTOM}]}, "tools"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_chats(without: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = chat(without, **fields)
    error = error_of(answer, 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert "is not supported by this server: the part that makes outputs match is not installed" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello", "guided_json": SCHEMA}),
        ("/v1/responses", {"input": "Hello", "text": {"format": {"type": "json_object"}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 4}),
        ("/api/chat", {"format": "json"}),
        ("/api/generate", {"prompt": "Hello", "format": SCHEMA}),
    ],
)
def test_other_apis(without: LiveServer, path: str, body: dict[str, Any]) -> None:
    messages = {} if "prompt" in body or "input" in body else {"messages": [{"role": "user", "content": "Hello"}]}
    answer = post(without, path, messages | body)
    assert answer.status == 400, answer.text
    assert "the part that makes outputs match is not installed" in answer.text


def test_tools_without_a_grammar_are_called(without: LiveServer) -> None:
    without.says(f'<tool_call>\n{{"name": "{NAMED}", "arguments": {{"city": "Oslo"}}}}\n</tool_call>')
    answer = chat(without, tools=[TOOL])
    assert answer.status == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": NAMED, "arguments": '{"city": "Oslo"}'}
    assert chat(without, response_format={"type": "text"}).status == 200
