"""Qwen3-Coder and Qwen3.5: a tag for the function and one for each parameter, whose values are plain text."""

import re
from typing import ClassVar

from penstock.frontend.parsing.calls.block import Block, EndOfTextError, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, Taught, ToolFormat
from penstock.frontend.parsing.calls.rules import NEW_LINE, Function, Rules, quoted, sequence
from penstock.frontend.parsing.calls.values import ArgumentWriter, arguments_rule

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^>\n]{0,256}")


class Qwen3Coder(ToolFormat):
    """Each call has a block of its own; models sometimes leave its mark out."""

    name = "qwen3_coder"
    models: ClassVar[tuple[str, ...]] = ("Qwen3-Coder", "Qwen3.5", "Qwen3.6", "Nemotron 3", "Step 3.5")
    example = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    taught_by: ClassVar[Taught] = ((_FUNCTION, _PARAMETER),)
    starts: tuple[str, ...] = ("<tool_call>", _FUNCTION)
    end = "</tool_call>"
    value_lines = "\n"
    """The text around a value."""
    separator = "\n"

    def __init__(self) -> None:
        self.marks = (self.starts[0], self.end)

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        if mark != _FUNCTION:
            yield from block.skip()
            yield from block.expects(_FUNCTION)
        while True:
            name = (yield from block.word(_NAME)).strip()
            if not name or not (yield from block.accepts(">")):
                raise NoCallError
            block.start_call(name)
            arguments = ArgumentWriter(block, schemas.get(name))
            yield from self._read_parameters(block, arguments)
            arguments.close()
            if mark == _FUNCTION:
                yield from self._read_lone_end(block)
                return
            yield from block.skip()
            if not (yield from block.accepts(_FUNCTION)):
                break
        yield from block.close(self.end, self.starts[0])

    def _read_parameters(self, block: Block, arguments: ArgumentWriter) -> Reading[None]:
        while True:
            yield from block.skip()
            if (yield from block.accepts(_FUNCTION_END)):
                return
            if (yield from block.sees(self.end)):
                return
            yield from block.expects(_PARAMETER)
            key, _ = yield from block.until(">")
            if self.value_lines:
                yield from block.accepts(self.value_lines)
            ends = (self.value_lines + _PARAMETER_END, _PARAMETER_END)
            yield from arguments.value(key.strip(), *ends, then=(_PARAMETER, _FUNCTION_END, self.end))

    def _read_lone_end(self, block: Block) -> Reading[None]:
        """Read a closing mark, if there is one: it may be there even if the block's opening mark is missing."""
        try:
            yield from block.skip()
            yield from block.accepts(self.end)
        except EndOfTextError:
            pass

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return f"{NEW_LINE} {self.any_call_rule(rules, functions)} {NEW_LINE} {rules.mark(self.end)}"

    def call_rule(self, rules: Rules, function: Function) -> str:
        between = quoted(">" + self.value_lines)
        arguments = arguments_rule(
            rules, function.arguments, quoted(_PARAMETER), lambda _: between, _PARAMETER_END, "\n", self.value_lines
        )
        return sequence(quoted(f"{_FUNCTION}{function.name}>\n"), arguments, quoted(_FUNCTION_END))


class SeedOss(Qwen3Coder):
    """The same format with marks of its own, and no line breaks around values."""

    name = "seed_oss"
    models: ClassVar[tuple[str, ...]] = ("Seed-OSS",)
    example = (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>"
    )
    taught_by = ("<seed:tool_call>",)
    starts = ("<seed:tool_call>",)
    end = "</seed:tool_call>"
    value_lines = ""
