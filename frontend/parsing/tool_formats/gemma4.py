"""Gemma 4 and FunctionGemma: `call:`, a name, and arguments in a notation with marks around strings."""

import re
from typing import ClassVar

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.literals import Notation, literal_rule, read_members
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted

_NAME = re.compile(r"[\w./:@\-]{0,256}")


class Gemma4(ToolFormat):
    """Each call has a block of its own."""

    name = "gemma4"
    models: ClassVar[tuple[str, ...]] = ("Gemma 4",)
    example = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'
    starts: tuple[str, ...] = ("<|tool_call>",)
    end = "<tool_call|>"
    quote = '<|"|>'
    separator = ""

    def __init__(self) -> None:
        self.marks = (self.starts[0], self.end, self.quote)
        self._notation = Notation((self.quote,), has_escapes=False, has_bare_keys=True, words=("true", "false", "null"))

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        yield from block.skip()
        yield from block.expects("call:")
        name = yield from block.word(_NAME)
        if not name or not (yield from block.accepts("{")):
            raise NoCallError
        block.start_call(name)
        block.add("{")
        yield from read_members(block, block.add, self._notation)
        block.add("}")
        block.end_call()
        yield from block.close(self.end, mark)

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return f"{quoted('call:')} {self.any_call_rule(rules, functions)} {rules.mark(self.end)}"

    def call_rule(self, rules: Rules, function: Function) -> str:
        schema = {**function.arguments, "type": "object"}
        return f"{quoted(function.name)} {literal_rule(rules, schema, schema, self._notation)}"


class FunctionGemma(Gemma4):
    """The same format with other marks."""

    name = "function_gemma"
    models: ClassVar[tuple[str, ...]] = ("FunctionGemma",)
    example = "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>"
    starts = ("<start_function_call>",)
    end = "<end_function_call>"
    quote = "<escape>"
