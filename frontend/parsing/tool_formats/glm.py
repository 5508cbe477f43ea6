"""GLM-4.5 and later: a name, then keys and values between tags; values are plain text."""

import re
from typing import ClassVar

from penstock.frontend.parsing.calls.block import Block, EndOfTextError, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, Taught, ToolFormat
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, repeated, sequence
from penstock.frontend.parsing.calls.values import ArgumentWriter, arguments_rule

_KEY = "<arg_key>"
_NAME = re.compile(r"[^<\s{]{0,256}")


class Glm(ToolFormat):
    """Each call has a block of its own. GLM-4.7 writes no line breaks; both ways are read."""

    name = "glm"
    models: ClassVar[tuple[str, ...]] = ("GLM-4.5", "GLM-4.6")
    taught_by: ClassVar[Taught] = ((_KEY, "</arg_key>\n"),)
    example = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
    call: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")
    key: ClassVar[tuple[str, str]] = (_KEY, "</arg_key>")
    value: ClassVar[tuple[str, str]] = ("<arg_value>", "</arg_value>")
    name_end: ClassVar[str] = ""
    """The mark after a call's name."""
    separator: str | None = "\n"
    line = "\n"
    """The text between tags."""

    def __init__(self) -> None:
        self.starts = self.call[:1]
        self.marks = (*self.call, *self.key, *self.value, *filter(None, [self.name_end]))

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        yield from self._read_call(block, schemas)
        yield from block.close(self.call[1], self.call[0])

    def _read_call(self, block: Block, schemas: Schemas) -> Reading[None]:
        begin, end = self.key[0], self.call[1]
        yield from block.skip()
        name = yield from block.word(_NAME)
        yield from block.skip()
        if self.name_end:
            yield from block.expects(self.name_end)
            yield from block.skip()
        if not name or not (yield from block.sees(begin, end)):
            raise NoCallError
        block.start_call(name)
        arguments = ArgumentWriter(block, schemas.get(name))
        while True:
            yield from block.skip()
            if not (yield from block.accepts(begin)):
                if block.ends_within(begin, end):
                    raise EndOfTextError
                break
            key, _ = yield from block.until(self.key[1])
            yield from block.skip()
            yield from block.expects(self.value[0])
            yield from arguments.value(key.strip(), self.value[1], then=(begin, end))
        arguments.close()

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return f"{self.any_call_rule(rules, functions)} {rules.mark(self.call[1])}"

    def call_rule(self, rules: Rules, function: Function) -> str:
        line = f"{quoted(self.line)} " if self.line else ""
        between = f"{rules.mark(self.key[1])} {line}{rules.mark(self.value[0])}"
        arguments = arguments_rule(
            rules, function.arguments, rules.mark(self.key[0]), lambda _: between, self.value[1], self.line
        )
        if not self.name_end:
            return f"{quoted(function.name + self.line)} {arguments}"
        return sequence(quoted(function.name), rules.mark(self.name_end), line.strip(), arguments)


class Glm47(Glm):
    """The same format without line breaks."""

    name = "glm47"
    models: ClassVar[tuple[str, ...]] = ("GLM-4.7", "GLM-5")
    example = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
    taught_by = (_KEY,)
    separator = ""
    line = ""


class Hy3(Glm):
    """One block has all calls, and every mark a suffix."""

    name = "hy3"
    models: ClassVar[tuple[str, ...]] = ("Hunyuan 3",)
    example = (
        "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Oslo</arg_value:opensource>\n"
        "</tool_call:opensource>\n</tool_calls:opensource>"
    )
    taught_by = ("<tool_calls:opensource>",)
    section: ClassVar[tuple[str, str]] = ("<tool_calls:opensource>", "</tool_calls:opensource>")
    call = ("<tool_call:opensource>", "</tool_call:opensource>")
    key = ("<arg_key:opensource>", "</arg_key:opensource>")
    value = ("<arg_value:opensource>", "</arg_value:opensource>")
    name_end = "<tool_sep:opensource>"
    separator = None

    def __init__(self) -> None:
        super().__init__()
        self.marks = (*self.section, *self.marks)
        self.starts = (self.section[0], self.call[0])

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        is_open = mark == self.call[0]
        while True:
            yield from block.skip()
            if not is_open and not (yield from block.accepts(self.call[0])):
                break
            is_open = False
            yield from self._read_call(block, schemas)
            yield from block.close(self.call[1], self.call[0], self.section[1])
            block.settle()
        if not block.has_calls:
            raise NoCallError
        yield from block.close(self.section[1], self.section[0])

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        one = sequence(rules.mark(self.call[0]), super().block_rule(rules, functions, parallel=parallel))
        return sequence(quoted("\n"), repeated(one, "\n", parallel=parallel), quoted("\n"), rules.mark(self.section[1]))
