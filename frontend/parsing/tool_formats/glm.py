"""GLM-4.5 and later: a name, then keys and values between tags; values are plain text."""

import re
from typing import ClassVar

from penstock.frontend.parsing.calls.block import Block, EndOfTextError, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, Taught, ToolFormat
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted
from penstock.frontend.parsing.calls.values import ArgumentWriter, arguments_rule

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^<\s{]{0,256}")


class Glm(ToolFormat):
    """Each call has a block of its own. GLM-4.7 writes no line breaks; both ways are read."""

    name = "glm"
    models: ClassVar[tuple[str, ...]] = ("GLM-4.5", "GLM-4.6")
    taught_by: ClassVar[Taught] = ((_KEY, f"{_KEY_END}\n"),)
    example = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
    starts = (_CALL,)
    marks = (_CALL, _CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    separator = "\n"
    line = "\n"
    """The text between tags."""

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        yield from block.skip()
        name = yield from block.word(_NAME)
        yield from block.skip()
        if not name or not (yield from block.sees(_KEY, _CALL_END)):
            raise NoCallError
        block.start_call(name)
        arguments = ArgumentWriter(block, schemas.get(name))
        while True:
            yield from block.skip()
            if not (yield from block.accepts(_KEY)):
                if block.ends_within(_KEY, _CALL_END):
                    raise EndOfTextError
                break
            key, _ = yield from block.until(_KEY_END)
            yield from block.skip()
            yield from block.expects(_VALUE)
            yield from arguments.value(key.strip(), _VALUE_END, then=(_KEY, _CALL_END))
        arguments.close()
        yield from block.close(_CALL_END, _CALL)

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return f"{self.any_call_rule(rules, functions)} {rules.mark(_CALL_END)}"

    def call_rule(self, rules: Rules, function: Function) -> str:
        line = f"{quoted(self.line)} " if self.line else ""
        between = f"{rules.mark(_KEY_END)} {line}{rules.mark(_VALUE)}"
        arguments = arguments_rule(
            rules, function.arguments, rules.mark(_KEY), lambda _: between, _VALUE_END, self.line
        )
        return f"{quoted(function.name + self.line)} {arguments}"


class Glm47(Glm):
    """The same format without line breaks."""

    name = "glm47"
    models: ClassVar[tuple[str, ...]] = ("GLM-4.7", "GLM-5")
    example = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
    taught_by = (_KEY,)
    separator = ""
    line = ""
