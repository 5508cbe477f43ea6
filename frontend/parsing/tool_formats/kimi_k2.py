"""Kimi K2: an id that holds the name, then the arguments, between marks."""

import re

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.json_calls import read_arguments
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, sequence

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_ID = re.compile(r"[A-Za-z0-9_.:\-]{0,300}")


class KimiK2(ToolFormat):
    """The model's ids (`functions.NAME:NUMBER`) are kept: its template shows them again."""

    name = "kimi_k2"
    models = ("Kimi K2", "Kimi K2 Thinking", "Kimi K2.5")
    example = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    starts = (_BEGIN, _CALL)
    marks = (_BEGIN, _END, _CALL, _CALL_END, _ARGUMENTS)

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return _BEGIN in template or "<|im_system|>tool_declare<|im_middle|>" in template

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        """Read a block."""
        is_open = mark == _CALL
        while True:
            yield from block.skip()
            if not is_open and not (yield from block.accepts(_CALL)):
                break
            is_open = False
            yield from block.skip()
            call_id = yield from block.word(_ID)
            yield from block.skip()
            yield from block.expects(_ARGUMENTS)
            yield from block.skip()
            name = call_id.partition(":")[0].removeprefix("functions.")
            if not name:
                raise NoCallError
            yield from read_arguments(block, name, call_id if ":" in call_id else "")
            yield from block.close(_CALL_END, _CALL, _END)
            block.settle()
        if not block.has_calls:
            raise NoCallError
        yield from block.close(_END, _BEGIN)

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a block behind its mark."""
        calls = [
            sequence(
                quoted(f"functions.{function.name}:"),
                "/[0-9]+/",
                rules.mark(_ARGUMENTS),
                rules.json(function.arguments),
            )
            for function in functions
        ]
        call = f"{rules.mark(_CALL)} {rules.rule(' | '.join(calls))} {rules.mark(_CALL_END)}"
        return f"({call}){'+' if parallel else ''} {rules.mark(_END)}"
