"""Calls in Python's syntax, in a list: Llama 3.2 (pythonic), Llama 4, Gemma 3, LFM2, OLMo 3."""

import re
from typing import Any, ClassVar

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, Taught, ToolFormat
from penstock.frontend.parsing.calls.literals import PYTHON, literal_rule, members, read_value, word_as_json
from penstock.frontend.parsing.calls.rules import NEW_LINE, Function, Rules, listed, quoted, regex, sequence
from penstock.frontend.parsing.calls.values import OF_OBJECTS, ArgumentWriter, resolved
from penstock.frontend.parsing.tool_formats.json_blocks import beginning_of_object, read_bare_objects
from penstock.frontend.text.call_style import functions_of

_NAME = re.compile(r"[\w./:@\-]{0,256}")
_ARGUMENT = re.compile(r"[^\s=,(){}\[\]'\"]{0,512}")
"""An argument's name, or a number or word in its place. Schemas also have names that Python has not: `$filter`."""
_BETWEEN = " \t\r\n,"


class Pythonic(ToolFormat):
    """A list of calls of offered tools at the start of a line, or a list between marks. JSON objects are read too."""

    name: ClassVar[str] = "pythonic"
    models: ClassVar[tuple[str, ...]] = ("Llama 3.2 (pythonic)", "Llama 4", "ToolACE")
    example = "[get_weather(city='Oslo')]"
    taught_by: ClassVar[Taught] = ("[func_name1(", "<|python_start|>")
    starts: tuple[str, ...] = ("<|python_start|>",)
    end = "<|python_end|>"
    opening = "[{"
    is_sure_behind: ClassVar[bool] = True
    """Whether calls after a mark may be of tools that were not offered."""

    def __init__(self) -> None:
        self.marks = (*self.starts, self.end)

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        """Read a list of calls."""
        known_only = not (mark and self.is_sure_behind)
        yield from block.skip()
        is_over = bool(mark) and bool((yield from block.accepts(self.end)))
        if is_over:  # Llama 4's template has only content between the marks, and calls after them
            yield from block.skip()
        if (yield from begins_with_object(block)):
            yield from read_bare_objects(block, known_only=known_only)
        else:
            end = self.end if mark else ""
            yield from read_list(block, schemas, end, known_only=known_only)
        if mark and not is_over:
            yield from block.close(self.end, mark)

    def start_rule(self, rules: Rules) -> str:
        """Only its own bracket opens a list."""
        return ""

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a list of calls."""
        call = self.any_call_rule(rules, functions)
        more = f' (", " {call})*' if parallel else ""
        return f'"[" {call}{more} "]"'

    def call_rule(self, rules: Rules, function: Function) -> str:
        return sequence(quoted(f"{function.name}("), arguments_rule(rules, function), '")"')

    def text_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of text that may end with a list of calls: no line of the text itself begins like one."""
        openings = [
            sequence(rules.text_until_line(regex(f"[{function.name}(")), arguments_rule(rules, function), '")"')
            for function in functions
        ]
        call = self.any_call_rule(rules, functions)
        more = f' (", " {call})*' if parallel else ""
        begins = rf"({beginning_of_list(functions)}|{beginning_of_object('parameters')})"
        text = rules.text_without_lines(begins, *self.starts)
        return f'({" | ".join(openings)}){more} "]" | {text}?'


class Gemma3(Pythonic):
    """The model was not trained on one format: it writes a list or objects, bare or fenced, as the template asks."""

    name = "gemma3"
    models: ClassVar[tuple[str, ...]] = ("Gemma 3 with a template for tools",)
    example = "[get_weather(city='Oslo')]"
    taught_by: ClassVar[Taught] = (("<start_of_turn>", "```tool_code"), ("<start_of_turn>", "[func_name1("))
    starts = ("```tool_code", "```python", "```json")
    end = "```"
    is_sure_behind = False


class Lfm2(Pythonic):
    """The list is between marks."""

    name = "lfm2"
    models: ClassVar[tuple[str, ...]] = ("LFM2", "LFM2.5")
    example = "<|tool_call_start|>[get_weather(city='Oslo')]<|tool_call_end|>"
    taught_by: ClassVar[Taught] = (
        "<|tool_call_start|>", "<|tool_list_start|>", ("List of tools: ", "<|im_start|>")
    )  # fmt: skip
    starts = ("<|tool_call_start|>",)
    end = "<|tool_call_end|>"
    opening = ""

    def written(self, calls: list[Any]) -> str:
        return f"{self.starts[0]}[{', '.join(map(_as_python, functions_of(calls)))}]{self.end}"

    def start_rule(self, rules: Rules) -> str:
        return rules.mark(self.starts[0])

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return f"{super().block_rule(rules, functions, parallel=parallel)} {rules.mark(self.end)}"

    def text_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of text that may contain lists of calls."""
        return ToolFormat.text_rule(self, rules, functions, parallel=parallel)


class Olmo3(Lfm2):
    """One line for each call, between tags."""

    name = "olmo3"
    models: ClassVar[tuple[str, ...]] = ("OLMo 3",)
    example = '<function_calls>\nget_weather(city="Oslo")\n</function_calls>'
    taught_by = ("<function_calls>",)
    starts = ("<function_calls>",)
    end = "</function_calls>"

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        call = self.any_call_rule(rules, functions)
        return f"{NEW_LINE} ({call} {NEW_LINE}){'+' if parallel else ''} {rules.mark(self.end)}"


def beginning_of_list(functions: list[Function]) -> str:
    """A regular expression for the beginning of a list of calls."""
    names = "|".join(regex(function.name) for function in functions)
    return rf"\[[ \t\r\n,]*({names})\("


def begins_with_object(block: Block) -> Reading[bool]:
    """Whether an object comes next, or an array that begins with one."""
    before = block.num_unsettled
    yield from block.accepts("[")
    yield from block.skip()
    first = yield from block.peek()
    block.back(block.num_unsettled - before)
    return first == "{"


def read_list(block: Block, schemas: Schemas, end: str = "", *, known_only: bool) -> Reading[None]:
    """Read calls in brackets; with `end`, the mark that ends them, they may be without brackets."""
    is_list = yield from block.accepts("[")
    if not (is_list or end):
        raise NoCallError
    while True:
        yield from block.skip(_BETWEEN)
        if block.has_calls and (yield from block.accepts("]")):
            return
        if block.has_calls and not is_list and (yield from block.sees(end)):
            return
        yield from read_call(block, schemas, known_only=known_only)


def read_call(block: Block, schemas: Schemas, *, known_only: bool) -> Reading[None]:
    """Read a name and arguments in parentheses; positional arguments are taken in the order of the schema."""
    name = yield from block.word(_NAME)
    if not name or (known_only and name not in block.names) or not (yield from block.accepts("(")):
        raise NoCallError
    block.start_call(name)
    arguments = ArgumentWriter(block, schemas.get(name))
    keys = list(_properties(schemas.get(name)))
    while True:
        yield from block.skip(_BETWEEN)
        if (yield from block.accepts(")")):
            break
        word = yield from block.word(_ARGUMENT)
        yield from block.skip()
        if word and (yield from block.accepts("=")):
            arguments.key(word)
            yield from read_value(block, arguments.raw, PYTHON)
            continue
        yield from block.goes_on()
        if not keys:
            raise NoCallError
        arguments.key(keys.pop(0))
        if word:
            arguments.raw(word_as_json(word))
        else:
            yield from read_value(block, arguments.raw, PYTHON)
    arguments.close()


def arguments_rule(rules: Rules, function: Function) -> str:
    """The grammar of the text in a call's parentheses."""
    root = function.arguments
    schema = resolved(root, root)
    rules.leave_out(schema, OF_OBJECTS)
    items = [
        (f"{quoted(key + '=')} {literal_rule(rules, part, root, PYTHON)}", is_needed)
        for key, part, is_needed in members(schema, PYTHON)
    ]
    if items or schema.get("additionalProperties") is False:
        return listed(rules, items, ", ")
    rules.leave_out_of_open(schema)
    one = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {literal_rule(rules, {}, root, PYTHON)}'
    return f'({one} (", " {one})*)?'


def _as_python(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    given = arguments if isinstance(arguments, dict) else {}
    return f"{function['name']}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def _properties(schema: Any) -> dict[str, Any]:
    properties = resolved(schema, schema).get("properties")
    return properties if isinstance(properties, dict) else {}
