"""Functionary: arguments within a tag that has the tool's name, or `>>>`, the name, and arguments on a new line."""

import re

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.json_calls import read_arguments
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, regex, sequence

_NAME = re.compile(r"[\w./:@\-]{0,256}")


class FunctionaryV31(ToolFormat):
    """Also the format of Llama 3.1 for tools that the user defines."""

    name = "functionary_v31"
    models = ("Functionary 3.1",)
    example = '<function=get_weather>{"city": "Oslo"}</function>'
    starts = ("<function=",)
    separator = ""

    def is_taught_by(self, template: str) -> bool:
        return "<function=" in template and "<parameter" not in template

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        name = yield from block.word(_NAME)
        if not name:
            raise NoCallError
        yield from block.expects(">")
        yield from block.skip()
        yield from read_arguments(block, name)
        yield from block.close("</function>", mark)

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return f"{self.any_call_rule(rules, functions)} {quoted('</function>')}"

    def call_rule(self, rules: Rules, function: Function) -> str:
        return sequence(quoted(f"{function.name}>"), rules.json(function.arguments))


class FunctionaryV32(ToolFormat):
    """`>>>all` opens content. The prompt ends with the first `>>>`, so the output begins after it."""

    name = "functionary_v32"
    models = ("Functionary 3.2",)
    example = '>>>get_weather\n{"city": "Oslo"}'
    taught_by = (">>>all", "'>>>'")
    starts = (">>>",)
    separator = ""
    is_opened_by_prompt = True

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        name = yield from block.word(_NAME)
        yield from block.expects("\n")
        if name == "all":
            block.settle()
            return
        if name not in block.names:
            raise NoCallError
        yield from block.skip()
        yield from read_arguments(block, name)

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return self.any_call_rule(rules, functions)

    def call_rule(self, rules: Rules, function: Function) -> str:
        return sequence(quoted(f"{function.name}\n"), rules.json(function.arguments))

    def calls_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of an output that consists of calls alone; the prompt ends with the first mark."""
        call = self.block_rule(rules, functions, parallel=parallel)
        return sequence(call, f"({self.start_rule(rules)} {call})*") if parallel else call

    def text_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        calls = self.calls_rule(rules, functions, parallel=parallel)
        opened = rules.rule(rf"/(.|\n)*{regex(self.starts[0])}/", "[lazy]")
        text = f"({opened} {calls} | {rules.text_without(*self.starts)}?)"
        head = quoted("all\n")
        return f"{calls} | {head} {text}"
