"""POST /v1/responses, GET and DELETE /v1/responses/{id}"""

import secrets
import time
from typing import Any

import msgspec

from penstock.frontend import schema, sse
from penstock.frontend.errors import ApiError, UnsupportedParameter
from penstock.frontend.gathering import gather
from penstock.frontend.generation import Generation, SequenceEvent
from penstock.frontend.message_parser import MessageParser, ReasoningCounter
from penstock.frontend.output_format import OutputFormat, output_format_for
from penstock.frontend.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.response_builder import Event, ResponseBuilder
from penstock.frontend.schema_responses import (
    RESPONSES,
    DeletedResponse,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
)
from penstock.frontend.service import Service
from penstock.frontend.streaming import stream_reply
from penstock.frontend.tool_grammar import with_calls
from penstock.frontend.validate_responses import ValidResponse, validate_response


async def create_response(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """Answer a responses request.

    Raises:
        ApiError: before the first byte.
    """
    request = schema.decode(RESPONSES, body)
    rules = await service.admit(record)
    before = request.previous_response_id
    previous = service.responses.items(record.owner, before) if before else []
    valid = validate_response(request, rules, service.model.template, previous)
    model = service.model
    common = with_calls(valid.chat.common, valid.chat.tools, model.tokenizer, model.reasoning_format)
    with service.place(record, common, body):
        common = await service.with_grammar(common)
        prompt = common.truncated(await service.prompts.render_and_encode(valid.chat.conversation, rules))
        output_format = output_format_for(service.model, valid.chat, prompt)
        shown = service.model.tokenizer.special_ids(output_format.marks)
        generation = service.generate(common, [prompt], record, shown=shown)
    del body, request, previous  # they may be large, and the generation takes its time
    try:
        course = ResponseCourse(service, record, valid, output_format)
        if common.stream:
            return await stream_reply(service, record, common, generation, course, course.opening())
        return await _whole(service, record, generation, course)
    except BaseException:  # also a cancellation: the client has left
        service.finish(generation, record)
        raise


async def _whole(service: Service, record: RequestRecord, generation: Generation, course: "ResponseCourse") -> Reply:
    [answer] = await gather(generation)
    course.take(SequenceEvent(0, answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason))
    response = course.finished(service.usage(generation, record))
    service.finish(generation, record)
    return Reply(response)


async def retrieve_response(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v1/responses/{id}

    Raises:
        ResponseNotFound: if it is not stored here.
    """
    if record.query.get("stream", "false").lower() not in ("false", "0"):
        raise UnsupportedParameter("a stored response cannot be streamed", param="stream")
    return Reply(service.responses.get(record.owner, body.decode()))


async def delete_response(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """DELETE /v1/responses/{id}

    Raises:
        ResponseNotFound: if it is not stored here.
    """
    response_id = body.decode()
    service.responses.delete(record.owner, response_id)
    return Reply(msgspec.json.encode(DeletedResponse(response_id)))


class ResponseCourse:
    """One response from its first event to the last; the `Chunks` of its stream."""

    def __init__(
        self, service: Service, record: RequestRecord, valid: ValidResponse, output_format: OutputFormat
    ) -> None:
        self._service = service
        self._record = record
        self._valid = valid
        self._id = f"resp_{secrets.token_hex(24)}"
        self._created_at = int(time.time())
        self._parser = MessageParser(output_format)
        self._counter = ReasoningCounter(output_format, service.model.tokenizer)
        self._builder = ResponseBuilder()
        self._status: Status = "in_progress"
        self._num_events = 0

    def opening(self) -> bytes:
        """The events before any output."""
        response = self._response(None)
        return self._framed(
            [("response.created", {"response": response}), ("response.in_progress", {"response": response})]
        )

    def event(self, event: SequenceEvent, usage: schema.Usage | None = None) -> bytes:
        """The events of what has become certain."""
        return self._framed(self.take(event))

    def end(self, usage: schema.Usage | None) -> bytes:
        """The last event, with the whole response."""
        response = self.finished(usage)
        return self._framed([(f"response.{self._status}", {"response": msgspec.Raw(response)})])

    def failure(self, error: ApiError) -> bytes:
        """The last events of a response that fails after its first byte."""
        self._status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = self._response(None, ResponseError(code, error.message))
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self._framed([("response.failed", {"response": failed}), ("error", fields)])

    def take(self, event: SequenceEvent) -> list[Event]:
        """Take news of the sequence; what there is to tell of it."""
        self._record.num_reasoning_tokens = self._counter.feed(event.token_ids)
        parts = self._parser.feed(event.text)
        if event.finish_reason is None:
            return [found for part in parts for found in self._builder.add(part)]
        parts += self._parser.finish()
        self._record.num_calling = int(self._parser.end(event.finish_reason) == "tool_calls")
        self._status = "incomplete" if event.finish_reason == "length" else "completed"
        return [found for part in parts for found in self._builder.add(part)] + self._builder.finish(self._status)

    def finished(self, usage: schema.Usage | None) -> bytes:
        """The whole response as JSON; it is stored, if that is wanted."""
        response = msgspec.json.encode(self._response(usage))
        if self._valid.store:
            output: list[dict[str, Any]] = [msgspec.to_builtins(item) for item in self._builder.items]
            self._service.responses.put(self._record.owner, self._id, response, self._valid.items + output)
        return response

    def _response(self, usage: schema.Usage | None, error: ResponseError | None = None) -> Response:
        valid, sampling = self._valid, self._valid.chat.common.sampling
        return Response(
            id=self._id,
            created_at=self._created_at,
            status=self._status,
            model=valid.chat.common.model,
            output=list(self._builder.items),
            usage=None if usage is None else _usage(usage, self._record.num_reasoning_tokens),
            error=error,
            incomplete_details=IncompleteDetails("max_output_tokens") if self._status == "incomplete" else None,
            instructions=valid.instructions,
            max_output_tokens=valid.max_output_tokens,
            metadata=valid.metadata,
            parallel_tool_calls=valid.parallel_tool_calls,
            previous_response_id=valid.previous_response_id,
            reasoning=valid.reasoning,
            store=valid.store,
            temperature=sampling.temperature,
            text=valid.text,
            tool_choice=valid.tool_choice,
            tools=valid.tools,
            top_p=sampling.top_p,
            user=valid.user,
        )

    def _framed(self, events: list[Event]) -> bytes:
        framed = b""
        for kind, fields in events:
            data = {"type": kind, "sequence_number": self._num_events, **fields}
            self._num_events += 1
            framed += sse.named_event(kind, msgspec.json.encode(data))
        return framed


def _usage(usage: schema.Usage, num_reasoning_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(num_reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
