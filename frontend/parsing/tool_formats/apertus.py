"""Apertus: an array of objects whose one key is the tool's name, between <|tools_prefix|> and <|tools_suffix|>."""

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.json_calls import read_arguments, read_json_string
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted

_START, _END = "<|tools_prefix|>", "<|tools_suffix|>"


class Apertus(ToolFormat):
    """One block has all calls."""

    name = "apertus"
    models = ("Apertus",)
    example = '<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}]<|tools_suffix|>'
    starts = (_START,)
    marks = (_START, _END)

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this way of writing."""
        return _START in template

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        """Read a block."""
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
        yield from block.close(_END, _START)

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a block behind its mark."""
        calls = [
            f"{quoted('{' + quoted(function.name) + ': ')} {rules.json(function.arguments)} {quoted('}')}"
            for function in functions
        ]
        call = rules.rule(" | ".join(calls))
        more = f' (", " {call})*' if parallel else ""
        return f'"[" {call}{more} "]" {rules.mark(_END)}'
