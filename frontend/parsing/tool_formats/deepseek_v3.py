"""DeepSeek V3 and R1: a name, then the arguments in a fenced block, between marks."""

import re
from typing import ClassVar

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.json_calls import read_arguments
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, repeated, sequence

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{0,256}")


class DeepSeekV3(ToolFormat):
    """One block has all calls."""

    name = "deepseek_v3"
    models: ClassVar[tuple[str, ...]] = ("DeepSeek V3", "DeepSeek V3-0324", "DeepSeek R1", "DeepSeek R1-0528")
    example = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Oslo"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    starts = (BEGIN, CALL)
    marks = (BEGIN, END, CALL, CALL_END, SEPARATOR)

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return BEGIN in template and "```json" in template

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        """Read a block."""
        is_open = mark == CALL
        while True:
            yield from block.skip()
            if not is_open and not (yield from block.accepts(CALL)):
                break
            is_open = False
            yield from self._read_call(block)
            yield from block.close(CALL_END, CALL, END)
            block.settle()
        if not block.has_calls:
            raise NoCallError
        yield from block.close(END, BEGIN)

    def _read_call(self, block: Block) -> Reading[None]:
        """V3.1 writes the name alone and the arguments without a fence; V3 says `function` before the name."""
        yield from block.skip()
        name = yield from block.word(_NAME)
        yield from block.skip()
        yield from block.expects(SEPARATOR)
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

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a block behind its mark."""
        call = rules.rule(" | ".join(self._call_rule(rules, function) for function in functions))
        one = sequence(rules.mark(CALL), call, rules.mark(CALL_END))
        return sequence(repeated(one, self._between, parallel=parallel), rules.mark(END))

    _between = "\n"

    def _call_rule(self, rules: Rules, function: Function) -> str:
        name, closing = f"{function.name}\n```json\n", "\n```"
        return sequence(
            quoted("function"), rules.mark(SEPARATOR), quoted(name), rules.json(function.arguments), quoted(closing)
        )


class DeepSeekV31(DeepSeekV3):
    """The arguments stand behind the name. Both ways are read."""

    name = "deepseek_v31"
    models: ClassVar[tuple[str, ...]] = ("DeepSeek V3.1",)
    example = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    )
    _between = ""

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return BEGIN in template

    def _call_rule(self, rules: Rules, function: Function) -> str:
        return sequence(quoted(function.name), rules.mark(SEPARATOR), rules.json(function.arguments))
