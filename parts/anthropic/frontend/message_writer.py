"""A message from its first event to the last, streamed or not.

    message_start, a block's events ..., message_delta, message_stop

`message_start` has the prompt's usage, so it waits for the first output, which comes with the number of cached tokens.
If there is no output for a second, it is sent without that number. A `ping` follows the first block's start, and fills
silence.
"""

from typing import ClassVar

import msgspec
from msgspec import UNSET

from penstock.frontend import schema
from penstock.frontend.api.run import Run
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.errors import ApiError
from penstock.frontend.exchange import sse
from penstock.frontend.parsing.parser import MessageParser, OutputFormat, ReasoningCounter
from penstock.frontend.parsing.parts import Part
from penstock.parts.anthropic.frontend.blocks import BlockBuilder, Event
from penstock.parts.anthropic.frontend.errors import error_body
from penstock.parts.anthropic.frontend.schema import MessageAnswer, MessageTokensDetails, MessageUsage, TextBlock

_PING: Event = {"type": "ping"}


class MessageWriter:
    """One message from its first event to the last."""

    keep_alive: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, run: Run, output_format: OutputFormat, *, hides_thinking: bool) -> None:
        self._run = run
        self._id = f"msg_{run.record.request_id}"
        self._parser = MessageParser(output_format)
        self._counter = ReasoningCounter(output_format, run.service.model.tokenizer)
        self._builder = BlockBuilder(hides_thinking=hides_thinking)
        self._has_begun = False
        self._has_pinged = False
        self._finish_reason = ""
        self._stop_reason = ""
        self._stop_sequence: str | None = None

    def opening(self) -> bytes:
        """Nothing if there is output already; else the first event, and a ping, because output takes longer."""
        if self._run.generation.has_news:
            return b""
        self._has_pinged = True
        return _written([*self._start(), _PING])

    def event(self, event: SequenceEvent) -> bytes:
        """The events for the output that has become certain."""
        events = [*self._start(), *self.take(event)]
        if not self._has_pinged:
            at = next((i for i, each in enumerate(events, 1) if each["type"] == "content_block_start"), 0)
            if at:
                self._has_pinged = True
                events.insert(at, _PING)
        return _written(events)

    async def end(self) -> bytes:
        """The last events, with the stop reason and all usage."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        if wrong := await self._schema_error():
            delta["schema_error"] = wrong
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(await self._run.final_usage())}
        return _written([*self._start(), last, {"type": "message_stop"}])

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        error.request_id = self._run.record.request_id
        return sse.named_event("error", error_body(error))

    def take(self, event: SequenceEvent) -> list[Event]:
        """Take news of the sequence; return the events that report it."""
        self._run.record.num_reasoning_tokens = self._counter.feed(event.token_ids)
        events = self._add(self._parser.feed(event.text))
        if event.finish_reason is None:
            return events
        events += self._add(self._parser.finish())
        self._finish_reason = self._parser.end(event.finish_reason)
        self._run.record.num_calling = int(self._finish_reason == "tool_calls")
        self._stop_reason = self._reason_of(event)
        return events + self._builder.finish()

    async def finished(self) -> bytes:
        """The complete message as JSON."""
        return msgspec.json.encode(await self._message())

    def _reason_of(self, event: SequenceEvent) -> str:
        if self._finish_reason == "tool_calls":
            return "tool_use"
        if self._finish_reason == "length":
            is_within = (
                self._run.sampling[0].max_tokens == self._run.valid.max_tokens
            )  # otherwise the context is the limit
            return "max_tokens" if is_within else "model_context_window_exceeded"
        if isinstance(event.stop_reason, str):
            self._stop_sequence = event.stop_reason
            return "stop_sequence"
        return "end_turn"

    def _add(self, parts: list[Part]) -> list[Event]:
        return [event for part in parts for event in self._builder.add(part)]

    def _start(self) -> list[Event]:
        """The first event, if it has not been sent."""
        if self._has_begun:
            return []
        self._has_begun = True
        usage = self._usage(msgspec.structs.replace(self._run.usage(), completion_tokens=0))
        message = MessageAnswer(self._id, self._run.valid.model, [], None, None, usage)
        return [{"type": "message_start", "message": message}]

    async def _message(self) -> MessageAnswer:
        return MessageAnswer(
            self._id,
            self._run.valid.model,
            self._builder.blocks,
            self._stop_reason,
            self._stop_sequence,
            self._usage(await self._run.final_usage()),
            schema_error=await self._schema_error() or UNSET,
        )

    async def _schema_error(self) -> str:
        text = "".join(block.text for block in self._builder.blocks if isinstance(block, TextBlock))
        return await self._run.schema_error(text, self._finish_reason)

    def _usage(self, usage: schema.Usage) -> MessageUsage:
        num_cached, num_thinking = usage.prompt_tokens_details.cached_tokens, self._run.record.num_reasoning_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=num_cached,
            output_tokens_details=MessageTokensDetails(num_thinking) if num_thinking else UNSET,
        )


def _written(events: list[Event]) -> bytes:
    return b"".join(sse.named_event(event["type"], msgspec.json.encode(event)) for event in events)
