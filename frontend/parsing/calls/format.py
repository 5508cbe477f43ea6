"""The interface of a tool format, which is one way in which models write tool calls."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.frontend.draws_and_clock import DRAWS
from penstock.frontend.parsing.calls.block import Block, Reading
from penstock.frontend.parsing.calls.rules import Function, Rules, regex, repeated, sequence

ID_PREFIX = "call_"
"""Begins the ids of calls that have none of the model's own."""

Schemas = Mapping[str, Any]
"""The JSON schema of each offered tool's arguments, by its name."""


Taught = tuple[str | tuple[str, ...], ...]


class ToolFormat:
    """One way of writing calls. `penstock.frontend.parsing.tool_formats` has the formats, and their registry."""

    name: ClassVar[str]
    models: ClassVar[tuple[str, ...]]
    """Families that write calls in this format; for the documentation."""
    example: ClassVar[str]
    """A call of `get_weather` with the argument `city`, "Oslo"; for the documentation."""

    taught_by: ClassVar[Taught] = ()
    """A chat template teaches this format if it has one of these texts, or all of a group; empty: the first mark."""

    starts: tuple[str, ...] = ()
    """The marks that open a block of calls. Grammars make the model write the first of them."""
    marks: tuple[str, ...] = ()
    """All marks; a tokenizer may spell them as special tokens, which must then stay visible."""
    opening: str = ""
    """Characters of which each opens a block without a mark at the start of a line."""
    separator: str | None = None
    """The text between two blocks; None if one block has all calls."""

    is_opened_by_prompt: ClassVar[bool] = False
    """Whether the prompt ends with the first mark, even without tools."""

    def is_taught_by(self, template: str) -> bool:
        """Whether a chat template teaches this format."""
        template = template.replace("\\n", "\n")
        texts = self.taught_by or self.starts[:1]
        return any(all(part in template for part in ((text,) if isinstance(text, str) else text)) for text in texts)

    def make_id(self) -> str:
        """An id for a call to which the model has given none."""
        return ID_PREFIX + DRAWS.get().randbytes(12).hex()

    def written(self, calls: list[Any]) -> str:
        """Past calls as the model writes them, for templates that show none; empty if the format has no such template.

        `calls` are in the shape of chats, with their arguments as objects.
        """
        return ""

    @property
    def abstract_example(self) -> str:
        """The example without the tool and its arguments."""
        words = (("get_weather", "the_name"), ("city", "a_parameter"), ("Oslo", "its value"))
        return functools.reduce(lambda text, word: text.replace(*word), words, self.example)

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        """Read a block from after its opening mark or, without a mark, from its opening character on.

        Raises:
            NoCallError: if it is not a block of calls, or stops being one. What was not settled is then text.
            EndOfTextError: if the text ends before the block does.
        """
        raise NotImplementedError

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a block after its first mark, as a Lark expression."""
        raise NotImplementedError

    def call_rule(self, rules: Rules, function: Function) -> str:
        """The grammar of a call of one function, without the text around each call of a block."""
        raise NotImplementedError

    def any_call_rule(self, rules: Rules, functions: list[Function]) -> str:
        """The grammar of a call of one of the functions."""
        return rules.rule(" | ".join(self.call_rule(rules, function) for function in functions))

    def start_rule(self, rules: Rules) -> str:
        """The grammar of a block's opening."""
        return rules.mark(self.starts[0]) if self.starts else ""

    @property
    def text_ends(self) -> tuple[str, ...]:
        """The marks that the text around calls cannot contain."""
        return self.starts

    def calls_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of an output that consists of calls alone."""
        block = sequence(self.start_rule(rules), self.block_rule(rules, functions, parallel=parallel))
        if self.separator is None:
            return block
        return repeated(rules.rule(block), self.separator, parallel=parallel)

    def text_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of an output of text that may contain calls."""
        block = self.block_rule(rules, functions, parallel=parallel)
        text = rules.text_without(*self.text_ends)
        many = "*" if parallel else "?"
        start = self.start_rule(rules)
        if start.startswith("<["):  # a token
            return f"{text}? ({start} {block} {text}?){many}"
        opened = rules.rule(rf"/(.|\n)*{regex(self.starts[0])}/", "[lazy]")
        return f"({opened} {block}){many} {text}?"
