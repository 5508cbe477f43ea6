"""Every tool format: what its template writes is read back as the same calls, whole and at every cut."""

import itertools
import json
import random
from typing import Any, get_args, get_type_hints

import pytest

from penstock.config.options import FrontendOptions
from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.parser import OutputFormat, ValidTools, parse_message
from penstock.frontend.parsing.reasoning import REASONING_FORMATS
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS, tool_format_of
from penstock.frontend.text.chat_template import ChatTemplate
from tests.faults.soak import IS_SOAK
from tests.frontend.pieces import assert_same_at_every_cut, in_pieces
from tests.frontend.tool_templates import TEMPLATES

Call = tuple[str, dict[str, Any]]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "level": {"type": ["number", "null"]},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "filter": {"$ref": "#/$defs/Filter"},
    },
    "$defs": {"Filter": {"type": "object", "properties": {"a": {"type": "object"}}}},
}
NAMES = ("get_weather", "search", "do-it")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}} for name in NAMES
]
CASES: dict[str, list[Call]] = {
    "no call": [],
    "one call": [("get_weather", {"city": "Oslo"})],
    "no arguments": [("get_weather", {})],
    "two calls": [("get_weather", {"city": "Oslo"}), ("search", {"city": "Bergen", "days": 3})],
    "a dash in the name": [("do-it", {"days": 1})],
    "every type": [
        (
            "search",
            {"city": "12", "days": -7, "level": 2.5, "exact": True, "note": "x", "tags": ["a", "b"], "filter": {}},
        )
    ],
    "nothing and falsehood": [("search", {"level": None, "exact": False, "tags": []})],
    "nested": [
        ("search", {"filter": {"a": {"b": [1, {"c": "d"}], "e": None}, "f": [[], {}]}, "tags": ["x, y", "[z]"]})
    ],
    "unicode": [("search", {"city": "Tromsø 漢字 🙂", "tags": ["ß", "\u2028"]})],
    "lines": [("search", {"city": "a\nb\n\n  c\tend", "note": "def f(x):\n    return {'k': x}\n"})],
    "quotes": [("search", {"city": 'say "hi" \\ / \\n', "note": "it's"})],
    "braces": [("search", {"city": "}{][)(", "note": "a: b, c = d"})],
    "like JSON": [("search", {"city": '{"name": "get_weather", "arguments": {}}', "note": "[1, 2]"})],
    "empty text": [("search", {"city": "", "note": " "})],
}
ALPHABETICAL = ("gemma4", "function_gemma")


def tools_of(tool_format: ToolFormat, tools: list[dict[str, Any]] = TOOLS) -> ValidTools:
    names = frozenset(tool["function"]["name"] for tool in tools)
    return ValidTools(tools, names, parallel=True, tool_format=tool_format)


def output_format(name: str, *, reasoning: str = "") -> OutputFormat:
    tool_format = TOOL_FORMATS[name]
    marks = REASONING_FORMATS["harmony"] if name == "harmony" else REASONING_FORMATS.get(reasoning)
    return OutputFormat(reasoning=marks, tools=tools_of(tool_format), tool_format=tool_format)


def rendered(name: str, content: str, calls: list[Call]) -> str:
    """What the format's template writes of such an assistant's message."""
    tool_calls = [{"type": "function", "function": {"name": n, "arguments": arguments}} for n, arguments in calls]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    return ChatTemplate(TEMPLATES[name], {}).render([message], add_generation_prompt=False)


def as_values(calls: list[list[str]]) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_every_format_has_a_template() -> None:
    assert set(TEMPLATES) == set(TOOL_FORMATS)


def test_every_format_can_be_chosen() -> None:
    hints = get_type_hints(FrontendOptions)
    assert {*get_args(hints["tool_call_parser"])} == {"auto", "none", *TOOL_FORMATS}
    assert {*get_args(hints["reasoning_parser"])} == {"auto", "none", *REASONING_FORMATS}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_found_from_the_template(name: str) -> None:
    assert tool_format_of(TEMPLATES[name]).name == name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_template_writes_is_read_back(name: str, case: str) -> None:
    calls = CASES[case]
    if name == "minimax_m3" and case == "nested":
        calls = [("search", {"filter": {"a": {"b": [1, {"c": "d"}], "e": None}}})]  # it writes empty ones alike
    contents = ("", "I look it up. [1] <b> {x}\nReally:")
    for content in contents if IS_SOAK else contents[len(name + case) % 2 :][:1]:  # by default each meets half of all
        text = rendered(name, content, calls)
        reasoning, shown, found = assert_same_at_every_cut(output_format(name), text)
        assert as_values(found) == calls, text
        assert shown.strip() == content, text
        assert not reasoning


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("harmony", "functionary_v32")])
def test_reasoning_before_calls(name: str) -> None:
    for style, marks in REASONING_FORMATS.items():
        if not marks.has_channels:
            text = f"{marks.opening}\nLet me see.\n{marks.end}\n" + rendered(name, "Yes.", CASES["two calls"])
            found = assert_same_at_every_cut(output_format(name, reasoning=style), text)
            assert (found[0], found[1].strip(), as_values(found[2])) == ("Let me see.", "Yes.", CASES["two calls"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_strings_that_hold_the_marks(name: str) -> None:
    """Marks within a JSON string, or within a value that goes on behind them, end nothing."""
    tool_format = TOOL_FORMATS[name]
    for mark in tool_format.marks:
        if name == "harmony" or mark in ('<|"|>', "<escape>"):
            continue  # such a token cannot be in a text
        calls: list[Call] = [("search", {"city": f"write {mark} here", "note": f"{mark}x"})]
        found = assert_same_at_every_cut(output_format(name), rendered(name, "", calls))
        assert as_values(found[2]) == calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_outputs_that_are_cut_off(name: str) -> None:
    """Every beginning of an output: calls that were whole stay so, and pieces give what the whole gives."""
    text = rendered(name, "Well.", CASES["two calls"] + CASES["every type"])
    form = output_format(name)
    _, _, whole = in_pieces(form, [text])
    for end in range(len(text)):
        found = in_pieces(form, [text[:end]])
        assert in_pieces(form, list(text[:end])) == found
        for got, expected in zip(found[2], whole, strict=False):
            assert got[0] == expected[0]
            assert expected[1].startswith(got[1]) or got[1].startswith(expected[1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_that_mean_nothing(name: str) -> None:
    """No order of marks and braces may make a difference between pieces and whole, or raise."""
    tool_format = TOOL_FORMATS[name]
    words = rendered(name, "", CASES["two calls"])
    pool = [*tool_format.marks, "get_weather", "{", "}", '"', ":", "[", "]", "\n", " ", "word", "=", "(", ")", ">", "é"]
    for seed in range(120):
        rng = random.Random(f"{name} {seed}")
        text = "".join(rng.choice(pool) for _ in range(rng.randint(1, 14)))
        if rng.random() < 0.5:
            start, end = sorted(rng.choices(range(len(words)), k=2))
            text = words[:start] + text + words[end:]
        whole = in_pieces(output_format(name), [text])
        assert in_pieces(output_format(name), list(text)) == whole, text
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        assert (
            in_pieces(output_format(name), [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]) == whole
        )


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_example(name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    found = parse_message(output_format(name), tool_format.example, "stop")
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("get_weather", {"city": "Oslo"})]
    assert found.finish_reason == "tool_calls"


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_the_first_call_counts_where_one_is_wanted(name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    tools = ValidTools(TOOLS, frozenset(NAMES), parallel=False, tool_format=tool_format)
    form = OutputFormat(
        reasoning=REASONING_FORMATS["harmony"] if name == "harmony" else None, tools=tools, tool_format=tool_format
    )
    found = assert_same_at_every_cut(form, rendered(name, "", CASES["two calls"]))
    assert as_values(found[2]) == CASES["two calls"][:1]
