"""The events of a stream, written with as little work per token as possible.

Everything but a chunk's text is the same for all chunks of a sequence, so it is encoded once; a chunk
is then prefix + text as JSON + suffix.
"""

from typing import Any, ClassVar

import msgspec

from penstock.frontend.api.logprobs import ScoreWriter
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.errors import ApiError
from penstock.frontend.exchange import sse
from penstock.frontend.schema import CompletionLogprobs, Usage

_encode = msgspec.json.encode


class _Chunks:
    """What chat and completions streams share. `object_name` and the part before the text differ."""

    _empty: ClassVar[dict[str, object]]  # of a choice without news

    def __init__(
        self, response_id: str, created: int, model: str, object_name: str, fingerprint: str, *, include_usage: bool
    ) -> None:
        head = {"id": response_id, "object": object_name, "created": created, "model": model}
        head["system_fingerprint"] = fingerprint
        self._head = sse.PREFIX + _encode(head)[:-1]  # without the closing brace
        self._no_usage = b',"usage":null}' + sse.SUFFIX if include_usage else b"}" + sse.SUFFIX

    def _tail(self, usage: Usage | None) -> bytes:
        return self._no_usage if usage is None else b',"usage":' + _encode(usage) + b"}" + sse.SUFFIX

    def end(self, usage: Usage | None) -> bytes:
        """The mark of a complete stream; before it, if it is wanted, a chunk with usage and no choices."""
        if usage is None:
            return sse.DONE
        return self._head + b',"choices":[],"usage":' + _encode(usage) + b"}" + sse.SUFFIX + sse.DONE

    def mismatch(self, index: int, error: str) -> bytes:
        """A chunk that says why a finished text does not match its schema."""
        choice = {"index": index, **self._empty, "logprobs": None, "finish_reason": None, "schema_error": error}
        return self._head + b',"choices":[' + _encode(choice) + b"]" + self._no_usage

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        return sse.error_event(error)


class ChatChunks(_Chunks):
    """chat.completion.chunk events."""

    _empty: ClassVar[dict[str, object]] = {"delta": {}}

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        *,
        fingerprint: str,
        include_usage: bool,
        token_ids: bool,
        scores: ScoreWriter | None = None,
    ) -> None:
        """`scores` writes log-probabilities, if they were asked for."""
        super().__init__(response_id, created, model, "chat.completion.chunk", fingerprint, include_usage=include_usage)
        self._token_ids = token_ids
        self._scores = scores
        self._before: dict[int, bytes] = {}
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._no_usage

    def role(self, index: int, prompt_token_ids: list[int] | None = None, usage: Usage | None = None) -> bytes:
        """The first chunk of a choice."""
        ids = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + _encode(prompt_token_ids)
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        return self._head + b',"choices":[' + choice + b"]" + ids + self._tail(usage)

    def delta(self, index: int, delta: bytes, usage: Usage | None = None) -> bytes:
        """A chunk with a delta that is JSON already."""
        choice = b'{"index":%d,"delta":' % index + delta + b',"logprobs":null,"finish_reason":null}'
        return self._head + b',"choices":[' + choice + b"]" + self._tail(usage)

    def event(self, event: SequenceEvent, usage: Usage | None = None) -> bytes:
        """Content chunk, finish chunk, or both; empty if there is nothing to show yet."""
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
            chunks += self._head + b',"choices":[' + _finish(event, {"delta": {}}) + b"]" + self._tail(usage)
        return chunks


class CompletionChunks(_Chunks):
    """text_completion events."""

    _empty: ClassVar[dict[str, object]] = {"text": ""}

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        *,
        fingerprint: str,
        include_usage: bool,
        token_ids: bool,
        scores: ScoreWriter | None = None,
    ) -> None:
        """`scores` writes log-probabilities, if they were asked for."""
        super().__init__(response_id, created, model, "text_completion", fingerprint, include_usage=include_usage)
        self._token_ids = token_ids
        self._scores = scores
        self._starts: dict[int, int] = {}  # characters of an echoed prompt before a choice's output
        self._before: dict[int, bytes] = {}
        self._after = b',"logprobs":null,"finish_reason":null}]' + self._no_usage

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


def _finish(event: SequenceEvent, fields: dict[str, Any]) -> bytes:
    """A choice with its end, if it has come to it."""
    choice = {"index": event.index, "logprobs": None, **fields, "finish_reason": event.finish_reason}
    if event.finish_reason is not None:
        choice["stop_reason"] = event.stop_reason
    return _encode(choice)
