"""Parses outputs made of messages in channels, as gpt-oss writes them: reasoning, calls and content.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

A message to a tool is a call, one in `analysis` is reasoning, all others are content.
"""

from collections.abc import Callable

from penstock.frontend.parsing.calls.block import Block, EndOfTextError, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.parts import Content, Part, Reasoning
from penstock.frontend.parsing.tool_formats.harmony import read_call, recipient_of

_HEADERS = ("<|channel|>", "<|start|>", " to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


class ChannelParser:
    """Turns one sequence's text into parts. Call `feed`, then `finish`; how the text is cut makes no difference."""

    def __init__(self, tool_format: ToolFormat, schemas: Schemas, *, parallel: bool = True) -> None:
        """`schemas` has the offered tools; if there are none, messages to tools are content."""
        self._block = Block(frozenset(schemas), tool_format.make_id, parallel=parallel, num_calls=0)
        self._has_tools = bool(schemas)
        self._said: dict[type[Part], bool] = {}
        self._reading: Reading[None] | None = self._read()

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._block.num_calls

    def feed(self, text: str) -> list[Part]:
        """Take the next piece of text; return what is certain now."""
        self._block.feed(text)
        return self._advance()

    def finish(self) -> list[Part]:
        """End the text; return what was held back."""
        self._block.is_final = True
        return self._advance()

    def _advance(self) -> list[Part]:
        if self._reading is not None:
            try:
                next(self._reading)
            except (StopIteration, EndOfTextError, NoCallError):
                self._reading = None
        parts = self._block.parts()
        if self._reading is None and not self._block.is_in_call:
            self._block.rewind()  # a header that never ended
            rest = self._block.take(len(self._block.rest))
            self._block.settle()
            parts += [Content(rest)] if rest else []
        return parts

    def _read(self) -> Reading[None]:
        block = self._block
        while True:
            yield from block.goes_on()
            if (yield from block.sees(*_HEADERS)):
                header, _ = yield from block.until("<|message|>")
                recipient = recipient_of(header)
                if recipient and self._has_tools:
                    yield from read_call(block, recipient)
                    block.is_in_call = False
                    continue
                kind: type[Reasoning | Content] = Reasoning if "<|channel|>analysis" in header else Content
                block.settle()
                yield from self._read_body(block, kind)
            else:
                yield from self._read_body(block, Content)

    def _read_body(self, block: Block, kind: type[Reasoning | Content]) -> Reading[None]:
        _, end = yield from block.until(*_ENDS, each=self._say(kind))
        if end in ("<|start|>", "<|channel|>"):
            block.back(len(end))
        block.settle()

    def _say(self, kind: type[Reasoning | Content]) -> Callable[[str], None]:
        """Return what passes on a message's text; two messages of the same kind are separated by a line break."""
        separator = "\n" if kind in self._said else ""

        def say(text: str) -> None:
            nonlocal separator
            self._said[kind] = True
            self._block.say(kind(separator + text))
            separator = ""

        return say
