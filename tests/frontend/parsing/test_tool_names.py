"""Names of tools: whatever a format can carry is taken, read back and enforced; anything else is refused."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.parser import parse_message
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.validation.common import Rules, SamplingDefaults
from penstock.frontend.validation.tools import validate_tools
from tests.frontend.parsing.test_tool_formats import SCHEMA, output_format, tools_of
from tests.frontend.tool_templates import TEMPLATES
from tests.parts.grammars.test_output_grammar import Models, form_of

NAMES = ["server/tool", "ns::tool", "files.read", "a@b", "wetter_für_\u6771\u4eac", "x" * 256]
"""As clients of MCP servers, and others, name tools."""


def tool_named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


def check(tool_format: ToolFormat, *names: str) -> None:
    rules = Rules(("m",), 1, 512, 384, (2,), SamplingDefaults(), tool_format=tool_format)
    validate_tools([tool_named(name) for name in names], None, None, ChatTemplate("", {}), rules)


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {})


def written(name: str, tool: str, arguments: dict[str, Any]) -> str:
    """What the format's template writes of a call."""
    calls = [{"type": "function", "function": {"name": tool, "arguments": arguments}}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    return template_of(name).render([message], add_generation_prompt=False)


def complaint_about(tool_format: ToolFormat, name: str) -> str:
    try:
        check(tool_format, name)
    except InvalidParameter as error:
        return error.message
    return ""


def read_back(name: str, tool: str) -> list[tuple[str, Any]]:
    """The calls in what the format's template writes of one."""
    output = replace(output_format(name), tools=tools_of(TOOL_FORMATS[name], [tool_named(tool)]))
    found = parse_message(output, written(name, tool, {"city": "Oslo"}), "stop")
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


@pytest.mark.parametrize("name", TEMPLATES)
def test_usual_names_are_read_back(name: str) -> None:
    check(TOOL_FORMATS[name], *NAMES)
    for tool in NAMES:
        assert read_back(name, tool) == [(tool, {"city": "Oslo"})]


@pytest.mark.parametrize("name", TEMPLATES)
def test_other_names_are_read_back_or_refused(name: str) -> None:
    for character in " #$(,={|\u2022":
        tool = f"get{character}it"
        complaint = complaint_about(TOOL_FORMATS[name], tool)
        if complaint:
            assert complaint.startswith(f"tools[0].function.name: this model's format for calls ({name})")
        else:
            assert read_back(name, tool) == [(tool, {"city": "Oslo"})], tool


@pytest.mark.parametrize("tool", ["", " ", "a\nb", "a\0b", "a\x7fb", 'a"b', "a'b", "a\\b", "a<b", "\ud800", "x" * 257])
def test_no_format_takes_these(tool: str) -> None:
    for tool_format in TOOL_FORMATS.values():
        with pytest.raises(InvalidParameter, match="1 to 256 characters"):
            check(tool_format, tool)


@pytest.mark.parametrize("name", TEMPLATES)
def test_forced_calls_have_these_names(name: str, models: Models) -> None:
    tool = "mcp/server::do@it"
    forced = form_of(name, forced=True)
    assert forced.tools is not None
    named = {"type": "function", "function": {"name": tool, "parameters": {"type": "object", "properties": {}}}}
    forced = replace(forced, tools=replace(forced.tools, definitions=[named], names=frozenset({tool})))
    text = written(name, tool, {}).strip()
    text = text.removeprefix(">>>") if name == "functionary_v32" else text
    text = text.removesuffix("<|call|>") if name == "harmony" else text
    assert models.of(name).takes(forced, text), text
    assert not models.of(name).takes(forced, text.replace("do@it", "do"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), "special")
