"""The events of a stream, written with as little work per token as possible.

Everything but a chunk's text is the same for all chunks of a sequence, so it is encoded once; a chunk
is then prefix + text as JSON + suffix.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from penstock.frontend.api.run import Run
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.errors import ApiError
from penstock.frontend.exchange import sse
from penstock.frontend.parsing.parser import MessageParser, OutputFormat, ReasoningCounter
from penstock.frontend.parsing.parts import CallArguments, CallStart, Content, Part, Reasoning
from penstock.frontend.schema import CompletionLogprobs, Usage

_encode = msgspec.json.encode


class _Chunks:
    """What the streams of chats and completions share."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    nothing: ClassVar[dict[str, object]]  # of a choice without news

    def __init__(self, run: Run) -> None:
        self.run = run
        valid = run.ready.valid
        head = {
            "id": f"{self.id_prefix}-{run.record.request_id}",
            "object": self.object_name,
            "created": int(time.time()),
            "model": valid.model,
            "system_fingerprint": run.service.fingerprint,
        }
        self._head = sse.PREFIX + _encode(head)[:-1]  # without the closing brace
        self._no_usage = b',"usage":null}' + sse.SUFFIX if valid.include_usage else b"}" + sse.SUFFIX
        self._token_ids = valid.return_token_ids
        self._scores = run.score_writer()  # None: nobody asked for them
        self._before: dict[int, bytes] = {}  # what stands before a choice's text
        self._is_checked = bool(run.ready.grammar.checked_schema)
        self._texts: dict[int, list[str]] = {}
        self._finish_reasons: dict[int, str] = {}

    def _collect(self, event: SequenceEvent) -> None:
        """Take down what goes out: at the end it is checked, because not all of its form could be enforced."""
        self._texts.setdefault(event.index, []).append(event.text)
        if event.finish_reason is not None:
            self._finish_reasons[event.index] = event.finish_reason

    def _tail(self, usage: Usage | None) -> bytes:
        return self._no_usage if usage is None else b',"usage":' + _encode(usage) + b"}" + sse.SUFFIX

    async def end(self, usage: Usage | None) -> bytes:
        """The mark of a complete stream.

        Before it a chunk for each finished text that does not match its schema; if it is wanted, one with usage.
        """
        end = b""
        for index, reason in sorted(self._finish_reasons.items()):
            if wrong := await self.run.schema_error("".join(self._texts[index]), reason):
                choice = {"index": index, **self.nothing, "logprobs": None, "finish_reason": None}
                end += self._head + b',"choices":[' + _encode(choice | {"schema_error": wrong}) + b"]" + self._no_usage
        if usage is not None:
            end += self._head + b',"choices":[],"usage":' + _encode(usage) + b"}" + sse.SUFFIX
        return end + sse.DONE

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        return sse.error_event(error)


class ChatChunks(_Chunks):
    """chat.completion.chunk events."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion.chunk"
    nothing: ClassVar[dict[str, object]] = {"delta": {}}

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._no_usage

    async def opening(self) -> bytes:
        """The first chunk of each choice."""
        valid, [prompt] = self.run.ready.valid, self.run.ready.prompts
        usage = self.run.usage() if valid.continuous_usage else None
        opening = b""
        for index in range(valid.num_sequences):
            ids = b',"prompt_token_ids":' + _encode(prompt) if self._token_ids and index == 0 else b""
            delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            opening += self._head + b',"choices":[{"index":%d,' % index + delta + ids + self._tail(usage)
        return opening

    def delta(self, index: int, delta: bytes, usage: Usage | None = None) -> bytes:
        """A chunk with a delta that is JSON already."""
        choice = b'{"index":%d,"delta":' % index + delta + b',"logprobs":null,"finish_reason":null}'
        return self._head + b',"choices":[' + choice + b"]" + self._tail(usage)

    def event(self, event: SequenceEvent, usage: Usage | None = None) -> bytes:
        """Content chunk, finish chunk, or both; empty if there is nothing to show yet."""
        if self._is_checked:
            self._collect(event)
        chunks = b""
        scores = event.scores if self._scores is not None else None
        if event.text or scores or (self._token_ids and event.token_ids):
            before = self._before.get(event.index)
            if before is None:
                before = self._head + b',"choices":[{"index":%d,"delta":{"content":' % event.index
                self._before[event.index] = before
            if usage is None and not self._token_ids and not scores:
                chunks = before + _encode(event.text) + self._after
            else:
                ids = b',"token_ids":' + _encode(event.token_ids) if self._token_ids else b""
                logprobs = _encode(self._scores.chat(scores)) if self._scores is not None and scores else b"null"
                rest = b'},"logprobs":' + logprobs + b',"finish_reason":null' + ids + b"}]" + self._tail(usage)
                chunks = before + _encode(event.text) + rest
        if event.finish_reason is not None:
            chunks += self._head + b',"choices":[' + _finish(event, self.nothing) + b"]" + self._tail(usage)
        return chunks


class ParsedChatChunks(ChatChunks):
    """chat.completion.chunk events of outputs that hold more than content: reasoning and tool calls."""

    def __init__(self, run: Run, output_format: OutputFormat) -> None:
        super().__init__(run)
        sequences, tokenizer = range(run.ready.valid.num_sequences), run.service.model.tokenizer
        self._parsers = [MessageParser(output_format) for _ in sequences]
        self._counters = [ReasoningCounter(output_format, tokenizer) for _ in sequences]
        self._num_reasoning_tokens = [0 for _ in sequences]

    def event(self, event: SequenceEvent, usage: Usage | None = None) -> bytes:
        """As many chunks as the event has parts; empty if nothing is certain yet."""
        index = event.index
        parser = self._parsers[index]
        self._num_reasoning_tokens[index] = self._counters[index].feed(event.token_ids)
        self.run.record.num_reasoning_tokens = sum(self._num_reasoning_tokens)
        parts = parser.feed(event.text)
        if event.finish_reason is None and len(parts) == 1 and isinstance(parts[0], Content):
            return super().event(replace(event, text=parts[0].text), usage)
        reason = event.finish_reason
        if reason is not None:
            parts += parser.finish()
            reason = parser.end(reason)
            self.run.record.num_calling += reason == "tool_calls"
        # What belongs to the tokens goes first, in a chunk without text; then the parts; then the end.
        chunks = super().event(replace(event, text="", finish_reason=None), usage)
        for part in parts:
            if isinstance(part, Content):
                chunks += super().event(SequenceEvent(index, part.text, []), usage)
            else:
                chunks += self.delta(index, _delta(part), usage)
        if reason is not None:
            end = SequenceEvent(index, "", [], reason, event.stop_reason)
            chunks += super().event(end, usage)
        return chunks


class CompletionChunks(_Chunks):
    """text_completion events."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    nothing: ClassVar[dict[str, object]] = {"text": ""}

    def __init__(self, run: Run, write_prompts: Callable[["CompletionChunks"], Awaitable[bytes]]) -> None:
        """`write_prompts` makes the opening: what is told of the prompts, written by `prompt`."""
        super().__init__(run)
        self._write_prompts = write_prompts
        self._starts: dict[int, int] = {}  # characters of an echoed prompt before a choice's output
        self._after = b',"logprobs":null,"finish_reason":null}]' + self._no_usage

    async def opening(self) -> bytes:
        """What is told of the prompts."""
        return await self._write_prompts(self)

    def prompt(
        self, index: int, text: str, prompt_token_ids: list[int] | None, logprobs: CompletionLogprobs | None = None
    ) -> bytes:
        """A choice's first chunk when its prompt is echoed, or its prompt's ids were asked for."""
        self._starts[index] = len(text)
        ids = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + _encode(prompt_token_ids)
        rest = b',"logprobs":' + _encode(logprobs) + b',"finish_reason":null' + ids + b"}]" + self._no_usage
        return self._start(index) + _encode(text) + rest

    def event(self, event: SequenceEvent, usage: Usage | None = None) -> bytes:
        """The chunk of an event; empty if there is nothing to show yet."""
        if self._is_checked:
            self._collect(event)
        scores = event.scores if self._scores is not None else None
        if event.finish_reason is None and usage is None and not self._token_ids and not scores:
            return self._start(event.index) + _encode(event.text) + self._after if event.text else b""
        if not (event.text or event.finish_reason or scores or (self._token_ids and event.token_ids)):
            return b""
        fields: dict[str, Any] = {"text": event.text}
        if self._token_ids:
            fields["token_ids"] = event.token_ids
        if self._scores is not None and scores:
            fields["logprobs"] = self._scores.completion(scores, self._starts.get(event.index, 0))
        return self._head + b',"choices":[' + _finish(event, fields) + b"]" + self._tail(usage)

    def _start(self, index: int) -> bytes:
        before = self._before.get(index)
        if before is None:
            before = self._before[index] = self._head + b',"choices":[{"index":%d,"text":' % index
        return before


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
    return _encode(delta)


def _finish(event: SequenceEvent, fields: Mapping[str, object]) -> bytes:
    """A choice with its end, if it has come to it."""
    choice = {"index": event.index, "logprobs": None, **fields, "finish_reason": event.finish_reason}
    if event.finish_reason is not None:
        choice["stop_reason"] = event.stop_reason
    return _encode(choice)
