"""MiniCPM 5: tags with names in attributes; values that hold markup are in CDATA sections."""

import re

from penstock.frontend.parsing.calls.block import Block, EndOfTextError, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, sequence
from penstock.frontend.parsing.calls.values import ArgumentWriter, arguments_rule

_NAME = re.compile(r'[^"\n<>]{0,256}')
_PARAMETER, _PARAMETER_END = '<param name="', "</param>"
_RAW, _RAW_END = "<![CDATA[", "]]>"
_END = "</function>"


class MiniCpm5(ToolFormat):
    """Each call is a block."""

    name = "minicpm5"
    models = ("MiniCPM 5",)
    example = '<function name="get_weather"><param name="city">Oslo</param></function>'
    taught_by = ((_PARAMETER, '<function name="'),)
    starts = ('<function name="',)
    separator = "\n"

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        name = yield from block.word(_NAME)
        if not name or not (yield from block.accepts('">')):
            raise NoCallError
        block.start_call(name)
        arguments = ArgumentWriter(block, schemas.get(name))
        while True:
            yield from block.skip()
            if not (yield from block.accepts(_PARAMETER)):
                if block.ends_within(_PARAMETER, _END):
                    raise EndOfTextError
                break
            key = yield from block.word(_NAME)
            yield from block.expects('">')
            is_raw = bool((yield from block.accepts(_RAW)))
            end = _RAW_END + _PARAMETER_END if is_raw else _PARAMETER_END
            yield from arguments.value(key, end, then=(_PARAMETER, _END))
        arguments.close()
        yield from block.accepts(_END)

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return sequence(self.any_call_rule(rules, functions), quoted(_END))

    def call_rule(self, rules: Rules, function: Function) -> str:
        between = quoted('">')
        arguments = arguments_rule(rules, function.arguments, quoted(_PARAMETER), lambda _: between, _PARAMETER_END)
        return sequence(quoted(f'{function.name}">'), arguments)
