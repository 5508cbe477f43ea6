"""What the chunks of chats and completions share."""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from penstock.frontend.api.run import Run
from penstock.frontend.draws_and_clock import CLOCK
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.errors import ApiError
from penstock.frontend.exchange import sse

_encode = msgspec.json.encode


class ChunkWriter:
    """The shared part of chat and completion streams, made for little work per token.

    Everything but the text is the same for all chunks of a sequence, so it is encoded once. A chunk is then
    prefix + text as JSON + suffix.
    """

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    nothing: ClassVar[dict[str, object]]  # the fields of a choice that has no new text
    keep_alive: ClassVar[bytes] = sse.KEEP_ALIVE

    def __init__(self, run: Run) -> None:
        self.run = run
        valid = run.valid
        head = {
            "id": f"{self.id_prefix}-{run.record.request_id}",
            "object": self.object_name,
            "created": int(CLOCK.get()()),
            "model": valid.model,
            "system_fingerprint": run.service.fingerprint,
        }
        self._head = sse.PREFIX + _encode(head)[:-1]  # without the closing brace
        self._no_usage = b',"usage":null}' + sse.SUFFIX if valid.include_usage else b"}" + sse.SUFFIX
        self._has_usage = valid.continuous_usage  # in each chunk
        self._token_ids = valid.return_token_ids
        self._scores = run.score_writer()  # None: not requested
        self._before: dict[int, bytes] = {}  # the bytes before a choice's text
        self._is_checked = bool(run.grammar.checked_schema)
        self._texts: dict[int, list[str]] = {}
        self._finish_reasons: dict[int, str] = {}

    def _collect(self, event: SequenceEvent) -> None:
        """Record output whose schema could not be fully enforced: it is validated at the end."""
        self._texts.setdefault(event.index, []).append(event.text)
        if event.finish_reason is not None:
            self._finish_reasons[event.index] = event.finish_reason

    def _choice(self, event: SequenceEvent, fields: Mapping[str, object]) -> bytes:
        """A choice with its end, if it has one."""
        choice = {"index": event.index, "logprobs": None, **fields, "finish_reason": event.finish_reason}
        if event.finish_reason is not None:
            choice["stop_reason"] = event.stop_reason
        return _encode(choice)

    def _tail(self) -> bytes:
        """The end of a chunk, with the usage so far if it is requested."""
        return b',"usage":' + _encode(self.run.usage()) + b"}" + sse.SUFFIX if self._has_usage else self._no_usage

    async def end(self) -> bytes:
        """The end of a complete stream.

        Includes a chunk for each finished text that does not match its schema, and one with usage if requested.
        """
        end = b""
        for index, reason in sorted(self._finish_reasons.items()):
            if wrong := await self.run.schema_error("".join(self._texts[index]), reason):
                choice = {"index": index, **self.nothing, "logprobs": None, "finish_reason": None}
                end += self._head + b',"choices":[' + _encode(choice | {"schema_error": wrong}) + b"]" + self._no_usage
        if self.run.valid.include_usage:
            end += self._head + b',"choices":[],"usage":' + _encode(await self.run.final_usage()) + b"}" + sse.SUFFIX
        return end + sse.DONE

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        return sse.error_event(error)
