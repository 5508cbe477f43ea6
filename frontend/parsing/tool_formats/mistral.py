"""Mistral: [TOOL_CALLS], then an array of objects or, since version 11 of its tokenizers, a name and arguments."""

import re
import string
from typing import ClassVar

from penstock.frontend.draws_and_clock import DRAWS
from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas
from penstock.frontend.parsing.calls.json_calls import read_arguments
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted
from penstock.frontend.parsing.tool_formats.json_blocks import JsonArrays, read_known_objects

_ALPHANUMERIC = string.ascii_letters + string.digits
_NAME = re.compile(r"[\w./:@\-]{0,256}")


class Mistral(JsonArrays):
    """An array of calls after the mark. Both forms are read."""

    name = "mistral"
    models: ClassVar[tuple[str, ...]] = ("Mistral 7B v0.3", "Mistral Nemo", "Mistral Small 2409", "Mixtral 8x22B")
    example = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]'
    ends = (("[TOOL_CALLS]", ""),)

    def make_id(self) -> str:
        """Make an id of nine letters and digits: Mistral's templates refuse others."""
        return "".join(DRAWS.get().choices(_ALPHANUMERIC, k=9))

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        # If the mark is a token of its own, templates write a space after it; models write either.
        return f'" "? {super().block_rule(rules, functions, parallel=parallel)}'

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        yield from block.skip()
        is_next_block = yield from block.sees(mark)
        if not is_next_block and (yield from block.peek()) in ("{", "["):
            yield from read_known_objects(block)
            return
        name = yield from block.word(_NAME)
        if not name:
            raise NoCallError
        yield from block.skip()
        call_id = ""
        if (yield from block.accepts("[CALL_ID]")):
            call_id = yield from block.word(_NAME)
        if (yield from block.accepts("[ARGS]")):
            yield from block.skip()
        yield from read_arguments(block, name, call_id if len(call_id) == 9 else "")


class MistralNamed(Mistral):
    """Each call has its own mark, followed by the name and the arguments."""

    name = "mistral_named"
    models: ClassVar[tuple[str, ...]] = ("Mistral Small 3.1 and later", "Ministral 3", "Magistral", "Devstral")
    example = '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}'
    taught_by = (("[TOOL_CALLS]", "[ARGS]"),)
    separator = ""

    def __init__(self) -> None:
        super().__init__()
        self.marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return self.any_call_rule(rules, functions)

    def call_rule(self, rules: Rules, function: Function) -> str:
        call_id = f"({rules.mark('[CALL_ID]')} /[A-Za-z0-9]{{9}}/)?"
        return f"{quoted(function.name)} {call_id} {rules.mark('[ARGS]')} {rules.json(function.arguments)}"
