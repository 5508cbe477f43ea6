"""Builds a message's content blocks from the parts of the model's output, and the events that report them.

    content_block_start, content_block_delta ..., content_block_stop

Streams send the events; complete answers use only the blocks.
"""

from typing import Any

import msgspec

from penstock.frontend.parsing.calls.format import ID_PREFIX
from penstock.frontend.parsing.parts import CallArguments, CallInput, CallStart, Content, Part, Reasoning
from penstock.parts.anthropic.frontend.schema import AnswerBlock, TextBlock, ThinkingBlock, ToolUseBlock
from penstock.parts.anthropic.frontend.signature import signature_of

Event = dict[str, Any]
"""An event with its type."""

INVALID = "INVALID_JSON"
"""If a call's arguments are not a JSON object, they are put into one under this key: clients expect an object."""


class BlockBuilder:
    """The blocks of one message. At most one block is open at any time."""

    def __init__(self, *, hides_thinking: bool = False) -> None:
        self.blocks: list[AnswerBlock] = []  # closed ones
        self._hides_thinking = hides_thinking
        self._open: AnswerBlock | None = None
        self._texts: list[str] = []

    def add(self, part: Part) -> list[Event]:
        """Take a part; return the events that report it."""
        match part:
            case CallStart(_, call_id, name):
                return [*self.finish(), self._begin(ToolUseBlock(_shown_id(call_id), name, {}))]
            case CallArguments(_, text) | CallInput(_, text):
                events = []
                delta = {"type": "input_json_delta", "partial_json": text}
            case Reasoning(text):
                events = self._switch(ThinkingBlock("", ""))
                delta = {"type": "thinking_delta", "thinking": text}
            case Content(text):
                events = self._switch(TextBlock(""))
                delta = {"type": "text_delta", "text": text}
        self._texts.append(text)
        if isinstance(part, Reasoning) and self._hides_thinking:
            return events
        return [*events, self._event("content_block_delta", delta=delta)]

    def finish(self) -> list[Event]:
        """Close the open block, if there is one."""
        block, text, events = self._open, "".join(self._texts), []
        match block:
            case None:
                return []
            case TextBlock():
                block.text = text
            case ToolUseBlock():
                block.input = _object(text)
            case ThinkingBlock():
                block.thinking = "" if self._hides_thinking else text
                block.signature = signature_of(text, is_hidden=self._hides_thinking)
                delta = {"type": "signature_delta", "signature": block.signature}
                events.append(self._event("content_block_delta", delta=delta))
        events.append(self._event("content_block_stop"))
        self.blocks.append(block)
        self._open = None
        return events

    def _switch(self, block: AnswerBlock) -> list[Event]:
        return [] if type(self._open) is type(block) else [*self.finish(), self._begin(block)]

    def _begin(self, block: AnswerBlock) -> Event:
        self._open, self._texts = block, []
        return self._event("content_block_start", content_block=msgspec.to_builtins(block))

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.blocks), **fields}


def _shown_id(call_id: str) -> str:
    """An id as Anthropic's clients know them; one that the model itself has written stays, for its template."""
    made = call_id.removeprefix(ID_PREFIX)
    return call_id if made == call_id else f"toolu_{made}"


def _object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; they may be incomplete or invalid."""
    if not arguments.strip():
        return {}
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {INVALID: arguments}
