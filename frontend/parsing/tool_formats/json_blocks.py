"""Calls that are JSON objects, between marks or bare: Hermes, Hunyuan, Nemotron, Granite, Phi-4-mini and others."""

import re
from typing import Any, ClassVar

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.json_calls import read_arguments, read_json_string, read_objects
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, regex, repeated, sequence
from penstock.frontend.text.call_style import calls_as_text

_BETWEEN_CALLS = re.compile(r"[ \t\r\n]*[;,]?[ \t\r\n]*")


class JsonBlocks(ToolFormat):
    """Blocks of one object, or of an array of them."""

    ends: ClassVar[tuple[tuple[str, str], ...]]
    """The marks that open a block, each with the mark that closes it; empty if none does."""
    arguments_key: ClassVar[str] = "arguments"
    around: ClassVar[tuple[str, str]] = ("", "")
    """Text between the marks and the calls."""

    def __init__(self) -> None:
        self._ends = dict(self.ends)
        self.starts = tuple(self._ends)
        self.marks = (*self.starts, *(end for end in self._ends.values() if end))

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        yield from block.skip()
        yield from read_known_objects(block)
        if self._ends[mark]:
            yield from block.close(self._ends[mark], *self.starts)

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        before, behind = (quoted(text) if text else "" for text in self.around)
        return sequence(before, self._calls_rule(rules, functions, parallel=parallel), behind, self._end_rule(rules))

    def _calls_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of the text between the marks."""
        return self.any_call_rule(rules, functions)

    def _end_rule(self, rules: Rules) -> str:
        end = self._ends[self.starts[0]]
        return rules.mark(end) if end else ""

    def call_rule(self, rules: Rules, function: Function) -> str:
        return sequence(quoted(self._opening_of(function)), rules.json(function.arguments), '"}"')

    def _opening_of(self, function: Function) -> str:
        return f'{{"name": {quoted(function.name)}, "{self.arguments_key}": '


class Hermes(JsonBlocks):
    """One object in a block; several calls are several blocks."""

    name = "hermes"
    models = ("Hermes 2 and 3", "Qwen2.5", "Qwen3", "QwQ", "SmolLM3", "Granite 4", "EXAONE 4", "ERNIE 4.5")
    example = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    ends = (("<tool_call>", "</tool_call>"),)
    around = ("\n", "\n")
    separator = "\n"


class InternLm(JsonBlocks):
    """The objects have the key `parameters`."""

    name = "internlm"
    models = ("InternLM 2.5", "InternLM 3")
    example = '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Oslo"}}<|action_end|>'
    taught_by = ("<|plugin|>",)
    ends = (("<|action_start|><|plugin|>", "<|action_end|>"),)
    arguments_key = "parameters"
    around = ("\n", "")
    separator = "\n"

    def __init__(self) -> None:
        super().__init__()
        self.marks = ("<|action_start|>", "<|plugin|>", "<|action_end|>")

    @property
    def text_ends(self) -> tuple[str, ...]:
        return self.marks[:1]

    def start_rule(self, rules: Rules) -> str:
        return sequence(*map(rules.mark, self.marks[:2]))


class JsonArrays(JsonBlocks):
    """The model writes one block, with an array of all calls."""

    inner: ClassVar[tuple[str, str, str]] = ("[", ", ", "]")
    """The text that opens the array, the text between calls, and the text that closes it."""

    def _calls_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        opening, between, closing = self.inner
        calls = repeated(self.any_call_rule(rules, functions), between, parallel=parallel)
        return sequence(quoted(opening), calls, quoted(closing))


class FireFunction(JsonArrays):
    """A word opens the array."""

    name = "firefunction"
    models = ("FireFunction v2",)
    example = 'functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'
    taught_by = ("functools[",)
    ends = (("functools", ""),)


class MiniMaxM1(JsonBlocks):
    """One block has all objects, one on each line."""

    name = "minimax_m1"
    models = ("MiniMax M1",)
    example = '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_calls>'
    taught_by = ('<tool_calls>\n{"name"',)
    ends = (("<tool_calls>", "</tool_calls>"),)
    around = ("\n", "\n")

    def _calls_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return repeated(self.any_call_rule(rules, functions), "\n", parallel=parallel)


class CommandRPlus(JsonArrays):
    """A list of actions in a fenced block. The action that only answers is no call."""

    name = "command_r_plus"
    models = ("Command R and R+ (tool use)",)
    example = 'Action:\n```json\n[\n    {"tool_name": "get_weather", "parameters": {"city": "Oslo"}}\n]```'
    taught_by = (("Action:", "directly-answer"),)
    ends = (("Action:\n```json\n", "```"), ("Action: ```json\n", "```"))
    inner = ("[\n    ", ",\n    ", "\n]")
    arguments_key = "parameters"

    def _opening_of(self, function: Function) -> str:
        return f'{{"tool_name": {quoted(function.name)}, "parameters": '


class Hunyuan(JsonArrays):
    name = "hunyuan"
    models = ("Hunyuan A13B", "Jamba 1.5 to 1.7")
    example = '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>'
    ends = (("<tool_calls>", "</tool_calls>"),)


class Nemotron(JsonArrays):
    name = "nemotron"
    models = ("Nemotron Nano 2", "Llama Nemotron Super and Ultra")
    example = '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>'
    ends = (("<TOOLCALL>", "</TOOLCALL>"),)


class Granite(JsonArrays):
    """Only its own bracket closes the array; some versions write a tag."""

    name = "granite"
    models = ("Granite 3.0 to 3.3",)
    example = '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'
    taught_by = (("<|tool_call|>", "<|start_of_role|>"),)
    ends = (("<|tool_call|>", ""), ("<tool_call>", ""))

    def written(self, calls: list[Any]) -> str:
        return f"<|tool_call|>{calls_as_text(calls)}"


class Phi4Mini(JsonArrays):
    """Both forms are read."""

    name = "phi4_mini"
    models = ("Phi-4-mini",)
    example = '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>'
    taught_by = ("<|/tool_call|>", ("<|tool|>", "<|/tool|>"))
    ends = (("<|tool_call|>", "<|/tool_call|>"), ("functools", ""))

    def written(self, calls: list[Any]) -> str:
        return f"<|tool_call|>{calls_as_text(calls)}<|/tool_call|>"


class CommandR(JsonArrays):
    """The objects have the keys `tool_name` and `parameters`, and number the calls."""

    name = "command_r"
    models = ("Command R7B", "Command A")
    example = (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}\n]'
        "<|END_ACTION|>"
    )
    ends = (("<|START_ACTION|>", "<|END_ACTION|>"),)
    inner = ("[\n", ",\n", "\n]")

    def call_rule(self, rules: Rules, function: Function) -> str:
        number = sequence(quoted('    {"tool_call_id": "'), "/[0-9]+/", quoted('", '))
        name = quoted(f'"tool_name": {quoted(function.name)}, "parameters": ')
        return sequence(number, name, rules.json(function.arguments), '"}"')


class Apertus(JsonArrays):
    """An object's only key is the tool's name."""

    name = "apertus"
    models = ("Apertus",)
    example = '<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}]<|tools_suffix|>'
    ends = (("<|tools_prefix|>", "<|tools_suffix|>"),)

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        yield from block.skip()
        yield from block.expects("[")
        while True:
            yield from block.skip(" \t\r\n,")
            if block.has_calls and (yield from block.accepts("]")):
                break
            yield from block.expects("{")
            yield from block.skip()
            name = yield from read_json_string(block)
            yield from block.skip()
            yield from block.expects(":")
            yield from block.skip()
            if not name:
                raise NoCallError
            yield from read_arguments(block, name)
            yield from block.skip()
            yield from block.accepts("}")
            block.settle()
        yield from block.close(self._ends[mark], mark)

    def call_rule(self, rules: Rules, function: Function) -> str:
        return sequence(quoted("{" + quoted(function.name) + ": "), rules.json(function.arguments), quoted("}"))


def read_known_objects(block: Block) -> Reading[None]:
    """Read objects, or arrays of them; after the first call, anything that is not a call ends the block."""
    try:
        yield from read_objects(block)
        while True:
            yield from block.skip()
            if (yield from block.peek()) != "{":
                break
            yield from read_objects(block)
    except NoCallError:
        if not block.has_calls:
            raise
        block.rewind()


def read_bare_objects(block: Block, *, known_only: bool) -> Reading[None]:
    """Read objects, or arrays of them, with nothing, ';' or ',' between them."""
    while True:
        yield from read_objects(block, known_only=known_only)
        yield from block.word(_BETWEEN_CALLS)
        following = yield from block.peek()
        if following != "{":
            if following:
                block.rewind()
            return


class BareObjects(JsonBlocks):
    """Calls may come without a mark: objects that name offered tools at the start of a line."""

    opening = "{["

    def start_rule(self, rules: Rules) -> str:  # only its own brace opens a call
        return ""

    def beginning(self, functions: list[Function]) -> str:
        """A regular expression for the beginning of a call without a mark."""
        return beginning_of_object(self.arguments_key)

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a call. It is all JSON, because only the keys may tell it from other JSON."""
        calls = []
        for function in functions:
            schema = _call_schema(function.name, function.arguments, self.arguments_key)
            instead = _call_schema(function.name, {"type": "object"}, self.arguments_key)
            calls.append(rules.json(schema, instead))
        return rules.rule(" | ".join(calls))

    def text_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of text that may end with calls: no line of the text itself begins like a call."""
        separator, openings = self.separator or "", []
        for function in functions:
            opening = rules.text_until_line(regex(self._opening_of(function)))
            openings.append(sequence(opening, rules.json(function.arguments), '"}"'))
        more = BareObjects.block_rule(self, rules, functions, parallel=parallel)
        calls = f"({' | '.join(openings)})" + (f" ({quoted(separator)} {more})*" if parallel else "")
        begins = self.beginning(functions)
        return f"{rules.rule(calls)} | {rules.text_without_lines(begins, *self.starts[:1])}?"


def beginning_of_object(arguments_key: str) -> str:
    """A regular expression for the beginning of a call's object, or of an array of them."""
    blank = r"[ \t\r\n]*"
    return rf"(\[{blank})?\{{{blank}\"({'|'.join(('name', 'function', 'type', arguments_key))})\""


def _call_schema(name: str, arguments: dict[str, Any], arguments_key: str) -> dict[str, Any]:
    """The JSON schema of a call's object. It contains the schema of the arguments, and all that this refers to."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            arguments_key: _moved(arguments, f"#/properties/{arguments_key}"),
        },
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to itself changed to point to its new place."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
