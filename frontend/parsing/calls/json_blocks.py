"""Formats of calls that are JSON objects between marks."""

import re
from typing import ClassVar

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.json_calls import call_schema, objects_rule, read_objects
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, regex, sequence

_BETWEEN_CALLS = re.compile(r"[ \t\r\n]*[;,]?[ \t\r\n]*")


class JsonBlocks(ToolFormat):
    """Blocks of one object, or of an array of them."""

    ends: ClassVar[tuple[tuple[str, str], ...]]
    """The marks that open a block, each with the one that closes it; empty if nothing does."""
    name_key: ClassVar[str] = "name"
    arguments_key: ClassVar[str] = "arguments"

    def __init__(self) -> None:
        self._ends = dict(self.ends)
        self.starts = tuple(self._ends)
        self.marks = (*self.starts, *(end for end in self._ends.values() if end))

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        """Read a block."""
        yield from block.skip()
        yield from read_known_objects(block)
        if self._ends[mark]:
            yield from block.close(self._ends[mark], *self.starts)


class JsonArrays(JsonBlocks):
    """The model writes one block, with an array of all calls."""

    inner: ClassVar[tuple[str, str]] = ("[", "]")
    """Around the calls."""

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a block behind its mark."""
        call = objects_rule(rules, functions, self.name_key, self.arguments_key)
        more = f' (", " {call})*' if parallel else ""
        end = self._ends[self.starts[0]]
        opening, closing = (rules.marks(text, end) if end else rules.marks(text, " ") for text in self.inner)
        return f"{opening} {call}{more} {closing}" + (f" {rules.mark(end)}" if end else "")


def read_known_objects(block: Block) -> Reading[None]:
    """Read an object or an array of them; what comes behind the first call and is none ends the block."""
    try:
        yield from read_objects(block)
    except NoCallError:
        if not block.has_calls:
            raise
        block.rewind()


def read_bare_objects(block: Block, *, known_only: bool) -> Reading[None]:
    """Read objects, or arrays of them, with nothing, ';' or ',' between them."""
    while True:
        yield from read_objects(block, known_only=known_only)
        yield from block.word(_BETWEEN_CALLS)
        following = yield from block.peek()
        if following != "{":
            if following:
                block.rewind()
            return


class BareObjects(JsonBlocks):
    """Calls may stand without a mark: objects of offered tools at the start of a line."""

    opening = "{["

    def start_rule(self, rules: Rules) -> str:
        """Nothing opens a call but its own brace."""
        return ""

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a call: all of it is JSON, since it may have to be told from other JSON by its keys."""
        calls = []
        for function in functions:
            schema = call_schema(function.name, function.arguments, self.name_key, self.arguments_key)
            instead = call_schema(function.name, {"type": "object"}, self.name_key, self.arguments_key)
            calls.append(rules.json(schema, instead))
        return rules.rule(" | ".join(calls))

    def text_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of text that may end with calls: in it no line begins like a call."""
        separator, openings = self.separator or "", []
        for function in functions:
            opening = f'{{"{self.name_key}": {quoted(function.name)}, "{self.arguments_key}": '
            openings.append(sequence(rules.text_until_line(regex(opening)), rules.json(function.arguments), '"}"'))
        more = self.block_rule(rules, functions, parallel=parallel)
        calls = f"({' | '.join(openings)})" + (f" ({quoted(separator)} {more})*" if parallel else "")
        blank = r"[ \t\r\n]*"
        keys = "|".join(("name", "function", "type", self.arguments_key))
        begins = rf"(\[{blank})?\{{{blank}\"({keys})\""
        return f"{rules.rule(calls)} | {rules.text_without_lines(begins, *self.starts[:1])}?"
