"""The format for templates that teach no known one: the usual marks, and bare objects.

It is also what models are asked to write whose template has no place for tools (`frontend/text/tool_prompt.py`).
"""

from typing import Any

from penstock.frontend.parsing.calls.block import Block, Reading
from penstock.frontend.parsing.calls.format import Schemas
from penstock.frontend.parsing.calls.rules import NEW_LINE, Function, Rules, quoted, regex
from penstock.frontend.parsing.tool_formats.json_blocks import BareObjects, read_bare_objects
from penstock.frontend.parsing.tool_formats.mistral import Mistral
from penstock.frontend.text.tool_prompt import generic_calls


class Generic(BareObjects):
    """Objects between any of the usual marks, or of offered tools at the start of a line."""

    name = "generic"
    models = ("any other",)
    example = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    taught_by = ("",)  # any template that teaches no other format
    ends = (
        ("<tool_call>", "</tool_call>"),
        ("<function_call>", "</function_call>"),
        ("<|tool_call|>", ""),
        ("<|python_tag|>", ""),
        ("[TOOL_CALLS]", ""),
    )
    separator = "\n"

    def __init__(self) -> None:
        super().__init__()
        self._mistral = Mistral()

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        if mark == "[TOOL_CALLS]":
            yield from self._mistral.read(block, mark, schemas)
        elif not mark or mark == "<|python_tag|>":
            yield from block.skip()
            yield from read_bare_objects(block, known_only=not mark)
        else:
            yield from super().read(block, mark, schemas)

    def written(self, calls: list[Any]) -> str:
        return generic_calls(calls)

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a call: between the first marks, or bare."""
        bare = super().block_rule(rules, functions, parallel=parallel)
        return rules.rule(f"{rules.mark(self.starts[0])} {self._rest_of_block(rules, bare)} | {bare}")

    def text_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        bare = super().block_rule(rules, functions, parallel=parallel)
        begins, mark = self.beginning(functions), regex(self.starts[0])
        no_call = rf"~/((.|\n)*\n)?[ \t\r]*{begins}(.|\n)*/"
        is_token = rules.tokenizer.token_id(self.starts[0]) is not None
        text = rules.text_without_lines(begins, *self.starts[:1])
        if is_token:
            opened = f"{text}? {rules.mark(self.starts[0])}"
        else:  # text that ends with its first mark
            opened = rules.terminal(rf"/(.|\n)*{mark}/ & ~/(.|\n)*{mark}(.|\n)+/ & {no_call}")
        block = self._rest_of_block(rules, bare)
        more = f"({quoted(self.separator or '')} {rules.mark(self.starts[0])} {block})*" if parallel else ""
        return rules.rule(f"{opened} {block} {more} | {super().text_rule(rules, functions, parallel=parallel)}")

    def _rest_of_block(self, rules: Rules, bare: str) -> str:
        return f"{NEW_LINE} {bare} {NEW_LINE} {rules.mark(self.ends[0][1])}"
