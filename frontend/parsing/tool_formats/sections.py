"""DeepSeek V3 and R1, Kimi K2: a section of calls, each with a header and arguments between marks of its own."""

import re
from typing import ClassVar

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, Taught, ToolFormat
from penstock.frontend.parsing.calls.json_calls import read_arguments
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, repeated, sequence

_NAME = re.compile(r"[\w./:@\-]{0,256}")
_ID = re.compile(r"[\w./:@\-]{0,300}")


class Sections(ToolFormat):
    """One block has all calls. Models sometimes leave out the section's mark."""

    section: ClassVar[tuple[str, str]]
    """The marks around all calls."""
    call: ClassVar[tuple[str, str]]
    """The marks around one call."""
    inner: ClassVar[str]
    """The mark between header and arguments."""
    between: ClassVar[str] = ""
    """The text between two calls."""

    def __init__(self) -> None:
        self.starts = (self.section[0], self.call[0])
        self.marks = (*self.section, *self.call, self.inner)

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        begin, end = self.call
        is_open = mark == begin
        while True:
            yield from block.skip()
            if not is_open and not (yield from block.accepts(begin)):
                break
            is_open = False
            yield from block.skip()
            yield from self._read_call(block)
            yield from block.close(end, begin, self.section[1])
            block.settle()
        if not block.has_calls:
            raise NoCallError
        yield from block.close(self.section[1], self.section[0])

    def _read_call(self, block: Block) -> Reading[None]:
        raise NotImplementedError

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        begin, end = map(rules.mark, self.call)
        one = sequence(begin, self.any_call_rule(rules, functions), end)
        return sequence(repeated(one, self.between, parallel=parallel), rules.mark(self.section[1]))


class DeepSeekV3(Sections):
    """A name, then the arguments in a fenced block."""

    name = "deepseek_v3"
    models: ClassVar[tuple[str, ...]] = ("DeepSeek V3", "DeepSeek V3-0324", "DeepSeek R1", "DeepSeek R1-0528")
    example = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Oslo"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    inner = "<｜tool▁sep｜>"
    between = "\n"
    taught_by: ClassVar[Taught] = ((section[0], "```json"),)

    def _read_call(self, block: Block) -> Reading[None]:
        """Read a call of V3.1 (just the name, and arguments without a fence) or of V3 (`function` before the name)."""
        name = yield from block.word(_NAME)
        yield from block.skip()
        yield from block.expects(self.inner)
        yield from block.skip()
        if (yield from block.peek()) != "{":
            if name != "function":
                raise NoCallError
            name = yield from block.word(_NAME)
            yield from block.skip()
            yield from block.accepts("```json", "```")
            yield from block.skip()
        if not name:
            raise NoCallError
        yield from read_arguments(block, name)

    def call_rule(self, rules: Rules, function: Function) -> str:
        name, closing = f"{function.name}\n```json\n", "\n```"
        return sequence(
            quoted("function"), rules.mark(self.inner), quoted(name), rules.json(function.arguments), quoted(closing)
        )


class DeepSeekV31(DeepSeekV3):
    """The arguments directly follow the name. Both forms are read."""

    name = "deepseek_v31"
    models: ClassVar[tuple[str, ...]] = ("DeepSeek V3.1",)
    example = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    )
    between = ""
    taught_by = ()

    def call_rule(self, rules: Rules, function: Function) -> str:
        return sequence(quoted(function.name), rules.mark(self.inner), rules.json(function.arguments))


class KimiK2(Sections):
    """The model's ids (`functions.NAME:NUMBER`) are kept: its template shows them again."""

    name = "kimi_k2"
    models = ("Kimi K2", "Kimi K2 Thinking", "Kimi K2.5")
    example = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    inner = "<|tool_call_argument_begin|>"
    taught_by = (section[0], "<|im_system|>tool_declare<|im_middle|>")

    def _read_call(self, block: Block) -> Reading[None]:
        call_id = yield from block.word(_ID)
        yield from block.skip()
        yield from block.expects(self.inner)
        yield from block.skip()
        name, _, number = call_id.rpartition(":")
        has_number = bool(name) and number.isdecimal()
        name = (name if has_number else call_id).removeprefix("functions.")
        if not name:
            raise NoCallError
        yield from read_arguments(block, name, call_id if has_number else "")

    def call_rule(self, rules: Rules, function: Function) -> str:
        number = sequence(quoted(f"functions.{function.name}:"), "/[0-9]+/")
        return sequence(number, rules.mark(self.inner), rules.json(function.arguments))


class SolarOpen(Sections):
    """Each call has an id, a name and arguments."""

    name = "solar_open"
    models = ("Solar Open",)
    example = (
        "<|tool_calls|><|tool_call:begin|>functions.get_weather:0<|tool_call:name|>get_weather<|tool_call:args|>"
        '{"city": "Oslo"}<|tool_call:end|><|calls|>'
    )
    section = ("<|tool_calls|>", "<|calls|>")
    call = ("<|tool_call:begin|>", "<|tool_call:end|>")
    inner = "<|tool_call:args|>"
    taught_by = (call[0],)
    _name = "<|tool_call:name|>"
    _next_message = "<|end|><|begin|>assistant"

    def __init__(self) -> None:
        super().__init__()
        begin = self.section[0]
        self.starts = (begin, self._next_message + begin, self._next_message.removeprefix("<|end|>") + begin)
        self.marks = (*self.marks, self._name)

    def _read_call(self, block: Block) -> Reading[None]:
        call_id = yield from block.word(_ID)
        yield from block.expects(self._name)
        name = yield from block.word(_NAME)
        yield from block.expects(self.inner)
        yield from block.skip()
        if not name:
            raise NoCallError
        yield from read_arguments(block, name, call_id)

    def call_rule(self, rules: Rules, function: Function) -> str:
        call_id, name = r"/[A-Za-z0-9_.:\/@\-]+/", quoted(function.name)
        return sequence(call_id, rules.mark(self._name), name, rules.mark(self.inner), rules.json(function.arguments))
