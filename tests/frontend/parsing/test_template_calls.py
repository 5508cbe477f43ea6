"""Past calls of tools, as templates of different families want them; clients send them with `content: null`."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.errors import TemplateFailed
from penstock.frontend.text.call_style import CallStyle, Chat
from penstock.frontend.text.chat_template import ChatTemplate
from tests.frontend.checkpoint_folder import write_checkpoint
from tests.frontend.http_client import post
from tests.frontend.live_server import LiveServer, live_server

LOOKS_INTO_CONTENT = (  # as Qwen3 does: fails unless the content is a text
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}{% set content = content.split('</think>')[-1] %}"
    "{% endif %}{{ content }}"
    "{%- for call in message.tool_calls or [] %}"
    "<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS_WHERE_NONE = (  # as DeepSeek does: calls are written where the content is none, their arguments as they are
    "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
    "{% for tool in message['tool_calls'] %}{{ '<call>' + tool['function']['name'] + '\n```json\n'"
    " + tool['function']['arguments'] + '\n```' }}{% endfor %}"
    "{% elif message['role'] == 'assistant' %}{{ '<a>' + message['content'] }}"
    "{% else %}{{ '<' + message['role'] + '>' + message['content'] }}{% endif %}{% endfor %}"
)
CALLS_WHERE_ABSENT = (
    "{% for message in messages %}{% if 'content' in message %}[{{ message.role }}]{{ message.content }}"
    "{% else %}{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}"
)
AS_IT_IS = (  # prints the arguments without `tojson`
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments }})"
    "{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}("
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %})"
    "{% endfor %}{% endfor %}"
)
NOT_BOTH = (  # as gpt-oss does: either of content and reasoning beside a call
    "{% for message in messages %}{% if message.tool_calls %}{% if message.content and message.thinking %}"
    "{{ raise_exception('not both') }}{% endif %}<{{ message.thinking or message.content }}>"
    "{% set call = message.tool_calls[0].function %}{{ call.name }}{{ call.arguments | tojson }}"
    "{% else %}{% if 'tool_calls' in message %}{{ raise_exception('no calls') }}{% endif %}{{ message.content }}"
    "{% endif %}{% endfor %}"
)
NO_CALLS = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"  # as Phi-4-mini

FAMILIES = [
    pytest.param(LOOKS_INTO_CONTENT, CallStyle("empty", "object"), id="text"),
    pytest.param(CALLS_WHERE_NONE, CallStyle("none", "text", content="apart"), id="none"),
    pytest.param(CALLS_WHERE_ABSENT, CallStyle("absent", "object", content="apart"), id="absent"),
    pytest.param(AS_IT_IS, CallStyle("empty", "text"), id="as it is"),
    pytest.param(EITHER, CallStyle("empty", "object"), id="either"),
    pytest.param(NOT_BOTH, CallStyle("empty", "object", content="joined"), id="not both"),
    pytest.param(NO_CALLS, CallStyle(), id="no calls"),
]

ARGUMENTS = {"city": "Ulm", "days": [1, None]}


def conversation(**fields: Any) -> Chat:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]


@pytest.mark.parametrize(("source", "style"), FAMILIES)
@pytest.mark.parametrize("fields", [{"content": None}, {}, {"content": None, "reasoning": "hm"}], ids=str)
def test_a_call_without_content_is_shown(source: str, style: CallStyle, fields: dict[str, Any]) -> None:
    template = ChatTemplate(source, {})
    text = template.render(conversation(**fields))
    assert "get_weather" in text
    assert "Rain." in text
    assert "None" not in text
    assert json.dumps(ARGUMENTS).replace(" ", "") in text.replace(" ", "")
    assert template.shape.style == style


def test_an_answer_with_only_reasoning_has_an_empty_text() -> None:
    chat: Chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "reasoning": "hm"}]
    assert "<|im_start|>assistant<|im_end|>" in ChatTemplate(LOOKS_INTO_CONTENT, {}).render(chat)


@pytest.mark.parametrize(("source", "style"), FAMILIES)
def test_content_and_reasoning_beside_a_call_do_no_harm(source: str, style: CallStyle) -> None:
    text = ChatTemplate(source, {}).render(conversation(content="Let me look.", reasoning="hm"))
    assert "get_weather" in text
    assert ("Let me look." in text) == (style.content != "dropped")
    assert ("Let me look." in ChatTemplate(source, {}).render(conversation(content="Let me look."))) == (
        style.content != "dropped"
    )


@pytest.mark.parametrize(("source", "style"), FAMILIES)
def test_an_empty_list_of_calls_is_none(source: str, style: CallStyle) -> None:
    chat: Chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Yes.", "tool_calls": []}]
    assert "Yes." in ChatTemplate(source, {}).render(chat)


def test_tools_in_the_system_message() -> None:
    """As Phi-4-mini's template has them."""
    source = (
        "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
        "{% if message['role'] == 'system' and 'tools' in message %}{{ '<tools>' + message['tools'] }}{% endif %}"
        "{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.shape.tools == "shown"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    written = '<tools>[{"name": "f", "parameters": {"type": "object"}}]<user>x'
    assert template.render([{"role": "user", "content": "x"}], tools=tools) == "<system>" + written
    chat: Chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
    assert template.render(chat, tools=tools) == "<system>Be brief." + written
    assert template.render(chat) == "<system>Be brief.<user>x"


def test_a_template_that_refuses_calls() -> None:
    refusing = ChatTemplate("{{ raise_exception('no tools') }}", {})
    with pytest.raises(TemplateFailed, match="no tools"):
        refusing.render(conversation(content=None))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("calls"), chat_template=LOOKS_INTO_CONTENT)
    with tempfile.TemporaryDirectory(prefix="pst-") as sockets, live_server(folder, Path(sockets)) as live:
        yield live


TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def test_the_second_turn_of_a_tool_loop(server: LiveServer) -> None:
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    server.says(said)
    request: dict[str, Any] = {
        "model": "test/model",
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"type": "function", "function": TOOL}],
    }
    message = post(server, "/v1/chat/completions", request).json()["choices"][0]["message"]
    assert message["content"] is None
    answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain."}
    server.says("It rains.")
    request["messages"] += [message, answer]
    second = post(server, "/v1/chat/completions", request)
    assert second.status == 200, second.json()
    assert second.json()["choices"][0]["message"]["content"] == "It rains."


def test_the_second_turn_of_responses(server: LiveServer) -> None:
    server.says('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>')
    request: dict[str, Any] = {"model": "test/model", "tools": [{"type": "function", **TOOL}]}
    first = post(server, "/v1/responses", {**request, "input": "Weather?"}).json()
    output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "Rain."}
    server.says("It rains.")
    second = post(server, "/v1/responses", {**request, "input": [output], "previous_response_id": first["id"]})
    assert second.status == 200, second.json()
    assert second.json()["output"][0]["content"][0]["text"] == "It rains."
