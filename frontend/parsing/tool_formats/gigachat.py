"""GigaChat 3: one JSON object, behind a token of its own or in a message of its own."""

from typing import ClassVar

from penstock.frontend.parsing.calls.format import Taught
from penstock.frontend.parsing.calls.rules import Rules
from penstock.frontend.parsing.tool_formats.json_blocks import JsonBlocks


class GigaChat(JsonBlocks):
    """A token opens the object."""

    name = "gigachat"
    models: ClassVar[tuple[str, ...]] = ("GigaChat 3.1",)
    example = '<|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    ends: ClassVar[tuple[tuple[str, str], ...]] = (("<|function_call|>", ""),)
    separator = ""


class GigaChat3(GigaChat):
    """The role `function call` opens the object, perhaps after the end of a message with text."""

    name = "gigachat3"
    models: ClassVar[tuple[str, ...]] = ("GigaChat 3",)
    example = '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    taught_by: ClassVar[Taught] = (("function call", "<|role_sep|>", "<|message_sep|>"),)
    ends = (("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""), ("function call<|role_sep|>\n", ""))

    def __init__(self) -> None:
        super().__init__()
        self.marks = ("<|message_sep|>", "<|role_sep|>")

    @property
    def text_ends(self) -> tuple[str, ...]:
        return self.marks[:1]

    def start_rule(self, rules: Rules) -> str:
        return rules.marks(self.starts[0], *self.marks)
