"""A response from its first event to the last, streamed or not."""

import sqlite3
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import msgspec
import structlog
from msgspec import UNSET, UnsetType

from penstock.frontend import schema
from penstock.frontend.api.run import Run
from penstock.frontend.draws_and_clock import CLOCK, DRAWS
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.errors import ApiError
from penstock.frontend.exchange import sse
from penstock.frontend.parsing.parser import MessageParser, OutputFormat, ReasoningCounter
from penstock.frontend.parsing.parts import Content, Part
from penstock.frontend.streams.keeper import StreamStopped
from penstock.parts.responses.frontend.builder import Event, ResponseBuilder
from penstock.parts.responses.frontend.part import stored_by
from penstock.parts.responses.frontend.schema import (
    ConversationId,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
)
from penstock.parts.responses.frontend.validate import ValidResponse

log = structlog.get_logger()


class ResponseWriter:
    """One response from its first event to the last."""

    def __init__(self, run: Run, valid: ValidResponse, output_format: OutputFormat) -> None:
        self._run = run
        self._valid = valid
        self.id = f"resp_{DRAWS.get().randbytes(24).hex()}"
        self._created_at = int(CLOCK.get()())
        self._parser = MessageParser(output_format)
        self._counter = ReasoningCounter(output_format, run.service.model.tokenizer)
        self._builder = ResponseBuilder(summarizes=valid.summarizes)
        self._scores = run.score_writer()
        self._untold: list[tuple[str, list[schema.ContentLogprob]]] = []  # texts and scores of tokens not reported yet
        self._num_characters = 0  # of the sequence's text so far, if its tokens are reported
        self.status: Status = "queued" if valid.background else "in_progress"
        self._usage: schema.Usage | None = None
        self._error: ResponseError | None = None
        self._completed_at: int | None = None
        self._finish_reason = ""
        self._schema_error: str | UnsetType = UNSET
        self._events = EventWriter()

    keep_alive: ClassVar[bytes] = sse.KEEP_ALIVE

    def opening(self) -> bytes:
        """The events before any output."""
        kinds = ("created", "queued") if self.status == "queued" else ("created", "in_progress")
        return self._events.write([(f"response.{kind}", {"response": self.shown()}) for kind in kinds])

    def event(self, event: SequenceEvent) -> bytes:
        """The events for the output that has become certain."""
        begun: list[Event] = []
        if self.status == "queued":
            self.status = "in_progress"
            begun = [("response.in_progress", {"response": self.shown()})]
        return self._events.write(begun + self.take(event))

    async def end(self) -> bytes:
        """The last event, with the complete response."""
        response = await self.finished()
        return self._events.write([(f"response.{self.status}", {"response": msgspec.Raw(response)})])

    def failure(self, error: ApiError) -> bytes:
        """The last events of a response that fails after its first byte."""
        if self._valid.background and isinstance(error, StreamStopped):
            self.status = "cancelled"
            return self._events.write([("response.cancelled", {"response": self.shown()})])
        self.status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._error = ResponseError(code, error.message)
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self._events.write([("response.failed", {"response": self.shown()}), ("error", fields)])

    def take(self, event: SequenceEvent) -> list[Event]:
        """Take news of the sequence; return the events that report it."""
        self._run.record.num_reasoning_tokens = self._counter.feed(event.token_ids)
        events = self._take_text(event)
        if event.finish_reason is None:
            return events
        parts = self._parser.finish()
        self._finish_reason = self._parser.end(event.finish_reason)
        self._run.record.num_calling = int(self._finish_reason == "tool_calls")
        self.status = "incomplete" if event.finish_reason == "length" else "completed"
        if self.status == "completed":
            self._completed_at = int(CLOCK.get()())
        return events + self._add(parts) + self._builder.finish(self.status, self._scores_after())

    def _take_text(self, event: SequenceEvent) -> list[Event]:
        if self._scores is None:
            return self._add(self._parser.feed(event.text))
        # Token by token, so that each part gets its own tokens, however many came at once.
        begin, events = self._num_characters, []
        self._num_characters += len(event.text)
        scores = event.scores or []
        # A token may have begun in an earlier event, or end behind the text, which ends with a stop string.
        offsets = [min(max(begin, token.offset), self._num_characters) for token in scores]
        for score, (start, end) in zip([None, *scores], pairwise([begin, *offsets, self._num_characters]), strict=True):
            text = event.text[start - begin : end - begin]
            self._untold.append((text, [] if score is None else self._scores.chat([score]).content))
            if text:
                events += self._add(self._parser.feed(text))
        return events

    def _add(self, parts: list[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            # Tokens of reasoning, calls and marks are not reported: the API has no place for them.
            events += self._builder.add(part, self._scores_of(part.text) if isinstance(part, Content) else ())
            self._untold = []
        return events

    def _scores_of(self, content: str) -> list[schema.ContentLogprob]:
        """The log-probabilities of the tokens that wrote `content`, which is the end of the unreported text.

        Those without a text that come just before it are its own, too: they are the first bytes of its first character.
        """
        begin = "".join(text for text, _ in self._untold).rfind(content)
        found: list[schema.ContentLogprob] = []
        for (text, scores), end in zip(self._untold, accumulate(len(text) for text, _ in self._untold), strict=True):
            if end > begin or (end == begin and not text):
                found += scores
        return found

    def _scores_after(self) -> list[schema.ContentLogprob]:
        """The log-probabilities of the tokens after the last character, such as the stop token."""
        if any(text for text, _ in self._untold):  # a mark came in between
            return []
        return [entry for _, scores in self._untold for entry in scores]

    async def finished(self) -> bytes:
        """The complete response as JSON; validated and stored if requested."""
        for item in self._builder.items:
            if isinstance(item, MessageItem) and not self._schema_error:
                text = "".join(part.text for part in item.content)
                self._schema_error = await self._run.schema_error(text, self._finish_reason) or UNSET
        self._usage = await self._run.final_usage()
        response = msgspec.json.encode(self.shown())
        if self._valid.store:
            await self.keep(is_known=self._valid.background)
        if self._valid.conversation is not None:
            await self._converse(self._valid.conversation)
        return response

    @property
    def is_over(self) -> bool:
        """Whether the response has its final status."""
        return self.status not in ("queued", "in_progress")

    async def keep(self, *, is_running: bool = False, is_known: bool = False) -> bool:
        """Store the response as it is now (see `ResponseStore.put`); return whether it is stored."""
        output: list[dict[str, Any]] = [_stored(item) for item in self._builder.items]
        given = self._valid.items
        return await stored_by(self._run.service).responses.put(
            self._run.record.key_id,
            self.id,
            msgspec.json.encode(self.shown()),
            given + output,
            num_before=self._valid.num_before,
            num_inputs=len(given) - self._valid.num_before,
            is_running=is_running,
            is_known=is_known,
        )

    async def renew(self) -> None:
        """Renew the response's lease in the store."""
        await stored_by(self._run.service).responses.renew(self._run.record.key_id, self.id)

    async def _converse(self, conversation_id: str) -> None:
        """Add the response's input and output to its conversation. If that was deleted meanwhile, only log it."""
        items = self._valid.items[self._valid.num_before :] + [_stored(item) for item in self._builder.items]
        try:
            await stored_by(self._run.service).conversations.append(self._run.record.key_id, conversation_id, items)
        except (ApiError, sqlite3.Error) as error:
            log.warning("conversation not continued", id=conversation_id, reason=str(error))

    def shown(self) -> Response:
        """The response as it is now."""
        usage = self._usage
        valid, sampling = self._valid, self._valid.chat.common.sampling
        return Response(
            id=self.id,
            created_at=self._created_at,
            completed_at=self._completed_at,
            status=self.status,
            model=valid.chat.common.model,
            system_fingerprint=self._run.service.fingerprint,
            output=list(self._builder.items),
            usage=None if usage is None else response_usage(usage, self._run.record.num_reasoning_tokens),
            error=self._error,
            incomplete_details=IncompleteDetails("max_output_tokens") if self.status == "incomplete" else None,
            instructions=valid.instructions,
            max_output_tokens=valid.max_output_tokens,
            max_tool_calls=valid.max_tool_calls,
            metadata=valid.metadata,
            parallel_tool_calls=valid.parallel_tool_calls,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            previous_response_id=valid.previous_response_id,
            prompt_cache_key=valid.prompt_cache_key,
            schema_error=self._schema_error,
            reasoning=valid.reasoning,
            safety_identifier=valid.safety_identifier,
            store=valid.store,
            temperature=sampling.temperature,
            text=valid.text,
            tool_choice=valid.tool_choice,
            tools=valid.tools,
            top_logprobs=valid.top_logprobs,
            top_p=sampling.top_p,
            truncation="auto" if valid.truncates else "disabled",
            user=valid.user,
            background=valid.background,
            conversation=UNSET if valid.conversation is None else ConversationId(valid.conversation),
        )


class EventWriter:
    """Numbers and frames the events of one stream."""

    def __init__(self) -> None:
        self._num_events = 0

    def write(self, events: list[Event], after: int = -1) -> bytes:
        """The bytes of these events, without those numbered up to `after`."""
        framed = b""
        for kind, fields in events:
            if self._num_events > after:
                data = {"type": kind, "sequence_number": self._num_events, **fields}
                framed += sse.named_event(kind, msgspec.json.encode(data))
            self._num_events += 1
        return framed


def response_usage(usage: schema.Usage, num_reasoning_tokens: int) -> ResponseUsage:
    """A response's usage, from that of its sequence."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(num_reasoning_tokens),
        total_tokens=usage.total_tokens,
        bill=usage.bill,
    )


def _stored(item: OutputItem) -> dict[str, Any]:
    """An output item in the form from which a later request of the conversation continues."""
    stored: dict[str, Any] = msgspec.to_builtins(item)
    for part in stored.get("content", ()):
        part.pop("logprobs", None)
    return stored
