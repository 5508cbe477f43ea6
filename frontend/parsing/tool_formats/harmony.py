"""gpt-oss: a call is a message to the tool in a channel of its own (see `frontend/parsing/channels.py`)."""

import re

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.json_calls import read_arguments
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, sequence
from penstock.frontend.parsing.reasoning import CHANNEL_MARKS

_RECIPIENT = re.compile(r" to=([^\s<]{1,300})")
_ENDS = ("<|call|>", "<|end|>", "<|return|>", "<|start|>", "<|channel|>")


class Harmony(ToolFormat):
    """The model makes one call, and ends its turn with it."""

    name = "harmony"
    models = ("gpt-oss",)
    example = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
    taught_by = (("<|channel|>", "<|constrain|>"), ("<|channel|>", "commentary"))
    starts = ("<|channel|>commentary to=", "<|start|>assistant<|channel|>commentary to=", "<|start|>assistant to=")
    marks = CHANNEL_MARKS

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        """Read a message to a tool."""
        header, _ = yield from block.until("<|message|>")
        recipient = recipient_of(f" to={header}")
        if not recipient:
            raise NoCallError
        yield from read_call(block, recipient)

    def start_rule(self, rules: Rules) -> str:
        return sequence(rules.mark("<|channel|>"), quoted("commentary to="))

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return self.any_call_rule(rules, functions)

    def call_rule(self, rules: Rules, function: Function) -> str:
        message = sequence(rules.mark("<|constrain|>"), quoted("json"), rules.mark("<|message|>"))
        return sequence(quoted(f"functions.{function.name} "), message, rules.json(function.arguments))


def recipient_of(header: str) -> str:
    """The tool that a message goes to; empty if it goes to none."""
    found = _RECIPIENT.search(header)
    return found[1].removeprefix("functions.") if found else ""


def read_call(block: Block, name: str) -> Reading[None]:
    """Read a call from its message's text on, up to and including the mark that ends the message."""
    yield from block.skip()
    if (yield from block.peek()) == "{":
        yield from read_arguments(block, name)
        _, end = yield from block.until(*_ENDS)
    else:
        block.start_call(name)
        _, end = yield from block.until(*_ENDS, each=block.add)
        block.end_call()
    if end in ("<|start|>", "<|channel|>"):
        block.back(len(end))
    block.settle()
