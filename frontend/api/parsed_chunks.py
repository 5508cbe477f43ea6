"""chat.completion.chunk events of outputs that hold more than content: reasoning and tool calls."""

from dataclasses import replace
from typing import Any

import msgspec

from penstock.frontend.api.chunks import ChatChunks
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.errors import ApiError
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.parsing.message_parser import MessageParser, ReasoningCounter
from penstock.frontend.parsing.message_parts import CallArguments, CallStart, Content, Part, Reasoning
from penstock.frontend.parsing.output_format import OutputFormat
from penstock.frontend.schema import Usage
from penstock.frontend.text.tokenizer import TextTokenizer


class ParsedChatChunks:
    """Chat chunks through a `MessageParser` for each sequence."""

    def __init__(
        self,
        chunks: ChatChunks,
        output_format: OutputFormat,
        num_sequences: int,
        tokenizer: TextTokenizer,
        record: RequestRecord,
    ) -> None:
        self._chunks = chunks
        self._parsers = [MessageParser(output_format) for _ in range(num_sequences)]
        self._counters = [ReasoningCounter(output_format, tokenizer) for _ in range(num_sequences)]
        self._num_reasoning_tokens = [0] * num_sequences
        self._record = record

    def end(self, usage: Usage | None) -> bytes:
        """The end of a complete stream."""
        return self._chunks.end(usage)

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        return self._chunks.failure(error)

    def event(self, event: SequenceEvent, usage: Usage | None = None) -> bytes:
        """As many chunks as the event has parts; empty if nothing is certain yet."""
        index = event.index
        parser = self._parsers[index]
        self._num_reasoning_tokens[index] = self._counters[index].feed(event.token_ids)
        self._record.num_reasoning_tokens = sum(self._num_reasoning_tokens)
        parts = parser.feed(event.text)
        if event.finish_reason is None and len(parts) == 1 and isinstance(parts[0], Content):
            return self._chunks.event(replace(event, text=parts[0].text), usage)
        reason = event.finish_reason
        if reason is not None:
            parts += parser.finish()
            reason = parser.end(reason)
            self._record.num_calling += reason == "tool_calls"
        # What belongs to the tokens goes first, in a chunk without text; then the parts; then the end.
        chunks = self._chunks.event(replace(event, text="", finish_reason=None), usage)
        for part in parts:
            if isinstance(part, Content):
                chunks += self._chunks.event(SequenceEvent(index, part.text, []), usage)
            else:
                chunks += self._chunks.delta(index, _delta(part), usage)
        if reason is not None:
            end = SequenceEvent(index, "", [], reason, event.stop_reason)
            chunks += self._chunks.event(end, usage)
        return chunks


def _delta(part: Part) -> bytes:
    delta: dict[str, Any]
    match part:
        case Reasoning():
            delta = {"reasoning": part.text, "reasoning_content": part.text}
        case CallStart():
            function = {"name": part.name, "arguments": ""}
            delta = {
                "tool_calls": [{"index": part.index, "id": part.call_id, "type": "function", "function": function}]
            }
        case CallArguments():
            delta = {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
        case Content():
            delta = {"content": part.text}
    return msgspec.json.encode(delta)
