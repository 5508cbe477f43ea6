"""Tool calls in text: what is a call, what is content, and that the borders of the pieces change nothing."""

import json
import random
import string
from typing import Any

import pytest

from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.calls.parser import ToolCallParser
from penstock.frontend.parsing.parser import OutputFormat, ValidTools
from penstock.frontend.parsing.parts import CallArguments, CallStart, Content, Part
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS
from tests.frontend.pieces import assert_same_at_every_cut

NAMES = ("f", "get_weather", "search")
SCHEMAS: dict[str, Any] = {name: {} for name in NAMES}
HERMES, LLAMA3_JSON, MISTRAL, GENERIC = (TOOL_FORMATS[n] for n in ("hermes", "llama3_json", "mistral", "generic"))
PYTHONIC = TOOL_FORMATS["pythonic"]
NUM_CASES = 500

Message = tuple[str, list[tuple[str, str]]]
"""Content, and (name, arguments) of each call."""


def collect(parts: list[Part]) -> Message:
    content = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case CallStart(index, call_id, name):
                assert index == len(calls)
                assert call_id
                calls.append((name, ""))
            case CallArguments(index, text):
                assert text
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


def parse(tool_format: ToolFormat, pieces: list[str], **options: Any) -> Message:
    parser = ToolCallParser(tool_format, SCHEMAS, **options)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    return collect(parts + parser.finish())


def assert_same_in_pieces(tool_format: ToolFormat, text: str, rng: random.Random) -> Message:
    whole = parse(tool_format, [text])
    assert parse(tool_format, list(text)) == whole
    for _ in range(3):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(tool_format, pieces) == whole
    return whole


# --- random messages ------------------------------------------------------------------------

ALPHABET = string.ascii_letters + string.digits + ' \n\t{}[]",:;\\/<>_' + "åß漢字🙂\u2028"
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name":', "[ARGS]", "\\", '"', "<", "["]


def random_text(rng: random.Random) -> str:
    pieces = [rng.choice(MARKS) if rng.random() < 0.2 else rng.choice(ALPHABET) for _ in range(rng.randint(0, 12))]
    return "".join(pieces)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.randint(-(10**12), 10**12)
    if kind == 2:
        return rng.uniform(-1e6, 1e6)
    if kind < 5:
        return random_text(rng)
    if kind == 5:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return random_arguments(rng, depth + 1)


def random_arguments(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    return {random_text(rng): random_value(rng, depth) for _ in range(rng.randint(0, 3))}


def dumped(rng: random.Random, value: Any) -> str:
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, None, 2]))


def random_call(rng: random.Random, key: str) -> tuple[str, str, str]:
    """A call's name, its arguments' text, and its object's text."""
    name, arguments = rng.choice(NAMES), dumped(rng, random_arguments(rng))
    members = [f'"name": "{name}"', f'"{key}": {arguments}']
    if rng.random() < 0.3:
        members.append(f'"id": {dumped(rng, random_text(rng))}')
    if rng.random() < 0.2:
        members.reverse()
    return name, arguments, "{" + rng.choice([", ", ",\n "]).join(members) + "}"


def random_words(rng: random.Random) -> str:
    """Text without marks, and without white space at its ends."""
    return "".join(rng.choice(string.ascii_letters + " .,\n'<[é漢") for _ in range(rng.randint(0, 30))).strip()


def between(rng: random.Random) -> str:
    return rng.choice(["", " ", "\n", "\n\n"])


def hermes_message(rng: random.Random, calls: list[tuple[str, str, str]]) -> tuple[str, str]:
    before = random_words(rng)
    blocks = [f"<tool_call>{between(rng)}{call[2]}{between(rng)}</tool_call>" for call in calls]
    after = random_words(rng)
    return before + between(rng) + between(rng).join(blocks) + between(rng) + after, before + after


def llama_message(rng: random.Random, calls: list[tuple[str, str, str]]) -> tuple[str, str]:
    before = random_words(rng) if rng.random() < 0.5 else ""
    opening = "<|python_tag|>" if before or rng.random() < 0.5 else ""
    text = opening + rng.choice([";", "; ", "\n", ", "]).join(call[2] for call in calls)
    return before + between(rng) + text + between(rng), before


def mistral_message(rng: random.Random, calls: list[tuple[str, str, str]]) -> tuple[str, str]:
    before = random_words(rng)
    if rng.random() < 0.5:
        text = "[TOOL_CALLS]" + between(rng) + "[" + ", ".join(call[2] for call in calls) + "]"
    else:
        separator = rng.choice(["", "[ARGS]", "[CALL_ID]a1B2c3D4e[ARGS]"])
        text = "".join(f"[TOOL_CALLS]{name}{separator}{arguments}" for name, arguments, _ in calls)
    after = random_words(rng)
    return before + between(rng) + text + between(rng) + after, before + after


def generic_message(rng: random.Random, calls: list[tuple[str, str, str]]) -> tuple[str, str]:
    make = rng.choice([hermes_message, mistral_message, llama_message])
    text, content = make(rng, calls)
    return text, content


CASES = {
    "hermes": (hermes_message, ("arguments",)),
    "llama3_json": (llama_message, ("parameters", "arguments")),
    "mistral": (mistral_message, ("arguments",)),
    "generic": (generic_message, ("arguments", "parameters")),
}


@pytest.mark.parametrize("name", CASES)
def test_random_messages_in_random_pieces(name: str) -> None:
    make, keys = CASES[name]
    tool_format = TOOL_FORMATS[name]
    for seed in range(NUM_CASES):
        rng = random.Random(f"{name} {seed}")
        calls = [random_call(rng, rng.choice(keys)) for _ in range(rng.randint(1, 3))]
        text, content = make(rng, calls)
        found = assert_same_in_pieces(tool_format, text, rng)
        assert found == (content, [call[:2] for call in calls]), text


@pytest.mark.parametrize("name", CASES)
def test_random_marks_in_random_pieces(name: str) -> None:
    """Text that means nothing: no order of marks and braces may make a difference between pieces and whole."""
    pool = [*MARKS, '{"name": "f"', ', "arguments": {', "}", "]", "\n", " ", ";", '"f"', "f{", "<tool_call>{", "word"]
    for seed in range(150):
        rng = random.Random(f"noise {seed}")
        text = "".join(rng.choice(pool) for _ in range(rng.randint(1, 15)))
        assert_same_in_pieces(TOOL_FORMATS[name], text, rng)


@pytest.mark.parametrize("name", CASES)
def test_text_without_calls_stays_as_it_is(name: str) -> None:
    for text in (
        "",
        " ",
        "\n Hello <b> world [1] \n",
        "a < b, [x](y) {z} ",
        '[\n  1\n]\n{"name": "x", "age": 3}',
        "<tool",
    ):
        assert assert_same_in_pieces(TOOL_FORMATS[name], text, random.Random(1)) == (text, [])


# --- single cases ---------------------------------------------------------------------------

WEATHER = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
OSLO = ("get_weather", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("tool_format", "text", "expected"),
    [
        (HERMES, f"<tool_call>{WEATHER}</tool_call>", ("", [OSLO])),
        (HERMES, f"<tool_call>{WEATHER}", ("", [OSLO])),
        (HERMES, f"<tool_call>{WEATHER}}}\n</tool_call>", ("", [OSLO])),
        (HERMES, f"<tool_call>{WEATHER}<tool_call>{WEATHER}</tool_call>", ("", [OSLO, OSLO])),
        (HERMES, f"<tool_call>[{WEATHER}, {WEATHER}]</tool_call>", ("", [OSLO, OSLO])),
        (HERMES, '<tool_call>{"name": "any"}</tool_call>', ("", [("any", "{}")])),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', ("", [("f", '{"a": "b')])),
        (HERMES, '<tool_call>{"name": "f', ('<tool_call>{"name": "f', [])),
        (HERMES, "<tool_call>no object</tool_call>", ("<tool_call>no object</tool_call>", [])),
        (HERMES, f"<tool_call>oh <tool_call>{WEATHER}</tool_call>", ("<tool_call>oh", [OSLO])),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>x', ('<tool_call>{"arguments": {}}</tool_call>x', [])),
        (HERMES, WEATHER, (WEATHER, [])),
        (LLAMA3_JSON, WEATHER, ("", [OSLO])),
        (LLAMA3_JSON, f"<|python_tag|>{WEATHER}; {WEATHER}", ("", [OSLO, OSLO])),
        (LLAMA3_JSON, f"Let me see.\n\n{WEATHER}", ("Let me see.", [OSLO])),
        (LLAMA3_JSON, f"Like {WEATHER}", (f"Like {WEATHER}", [])),
        (LLAMA3_JSON, '{"name": "other", "parameters": {}}', ('{"name": "other", "parameters": {}}', [])),
        (LLAMA3_JSON, '{"name": "f", "age": 3', ('{"name": "f", "age": 3', [])),
        (LLAMA3_JSON, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
        (MISTRAL, f"[TOOL_CALLS] [{WEATHER}]", ("", [OSLO])),
        (MISTRAL, f"[TOOL_CALLS][{WEATHER}, {{bad}}]", (", {bad}]", [OSLO])),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}"said"', ('"said"', [("f", '{"a": 1}')])),
        (MISTRAL, "[TOOL_CALLS] what is it", ("[TOOL_CALLS] what is it", [])),
        (MISTRAL, "[TOOL_CALLS]f", ("[TOOL_CALLS]f", [])),
        (GENERIC, f"<function_call>{WEATHER}</function_call>", ("", [OSLO])),
        (GENERIC, f"[{WEATHER}]", ("", [OSLO])),
        (GENERIC, f'[{{"type": "function", "function": {WEATHER}}}]', ("", [("get_weather", '{"city":"Oslo"}')])),
        (GENERIC, f"[TOOL_CALLS][{WEATHER}]", ("", [OSLO])),
        (PYTHONIC, r"[f(a='\x41\u0042\U00000043\U0001F600')]", ("", [("f", r'{"a": "\u0041\u0042\u0043😀"}')])),
        (PYTHONIC, "[f($filter='x', é-1=[1])]", ("", [("f", '{"$filter": "x", "é-1": [1]}')])),
        (PYTHONIC, r"[f(a='\x-1')]", ("", [("f", r'{"a": "\\x-1"}')])),
        (PYTHONIC, r"[f(a='C:\u', b=1)]", ("", [("f", r'{"a": "C:\\u", "b": 1}')])),
        (PYTHONIC, r"[f(a='\U99999999')]", ("", [("f", r'{"a": "\\U99999999"}')])),
    ],
)  # fmt: skip
def test_case(tool_format: ToolFormat, text: str, expected: Message) -> None:
    assert assert_same_in_pieces(tool_format, text, random.Random(2)) == expected


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser(HERMES, SCHEMAS)
    assert parser.feed('Sure.\n<tool_call>{"name": "f", ') == [Content("Sure.")]
    [start, first] = parser.feed('"arguments": {"a')
    assert isinstance(start, CallStart)
    assert (start.index, start.name) == (0, "f")
    assert first == CallArguments(0, '{"a')
    assert parser.feed('": 1') == [CallArguments(0, '": 1')]
    assert parser.feed("}}") == [CallArguments(0, "}")]
    assert parser.feed("</tool_call>\n") == parser.finish() == []


def test_without_parallel_calls_only_the_first_counts() -> None:
    text = f"<tool_call>{WEATHER}</tool_call><tool_call>{WEATHER}</tool_call>"
    assert parse(HERMES, [text], parallel=False) == ("", [OSLO])


def test_an_object_that_never_shows_its_name_is_text() -> None:
    text = '{"arguments": {"a": "' + "x" * 40_000 + '"}, "name": "f"}'
    assert assert_same_in_pieces(LLAMA3_JSON, text, random.Random(3)) == (text, [])


def test_mistral_ids_have_nine_characters() -> None:
    [start, *_] = ToolCallParser(MISTRAL, SCHEMAS).feed(f"[TOOL_CALLS][{WEATHER}]")
    assert isinstance(start, CallStart)
    assert len(start.call_id) == 9
    assert start.call_id.isalnum()


def test_llama_writes_calls_in_pythons_syntax_under_a_template_for_json() -> None:
    names = frozenset({"f", "g"})
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in sorted(names)]
    form = OutputFormat(tools=ValidTools(tools, names, True, LLAMA3_JSON), tool_format=LLAMA3_JSON)
    text = "[f(city='Oslo', days=3), g()]"
    assert assert_same_at_every_cut(form, text) == ("", "", [["f", '{"city": "Oslo", "days": 3}'], ["g", "{}"]])
    for other in ("[1, 2]", "[h(a=1)]", "[f] is a function"):
        assert assert_same_at_every_cut(form, other) == ("", other, [])
