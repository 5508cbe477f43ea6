"""POST /v1/responses and /v1/responses/input_tokens"""

import msgspec

from penstock.frontend import schema
from penstock.frontend.api.gathering import gather
from penstock.frontend.api.output_format import output_format_for
from penstock.frontend.api.output_grammar import output_grammar_of
from penstock.frontend.api.service import Service
from penstock.frontend.api.streaming import stream_reply
from penstock.frontend.engine.generation import Generation, SequenceEvent
from penstock.frontend.errors import ContextLengthExceeded, TooManyValues
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.json_size import PIECE_BYTES, JsonSize, TooManyValuesError
from penstock.frontend.responses.course import ResponseCourse
from penstock.frontend.responses.items import references, resolved
from penstock.frontend.responses.prompt import response_prompt
from penstock.frontend.responses.validate import ValidResponse, input_items, validate_response
from penstock.frontend.schema_responses import RESPONSES, InputTokens, ResponsesRequest
from penstock.frontend.validation.common import Rules
from penstock.frontend.validation.ready import ReadyRequest


async def create_response(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """Answer a responses request.

    Raises:
        ApiError: before the first byte.
    """
    request = schema.decode(RESPONSES, body)
    record.warnings += schema.unknown_fields(RESPONSES, body)
    rules = await service.admit(record)
    valid = await _validated(service, record, request, rules, len(body))
    common = valid.chat.common
    with service.place(record, common, body):
        prompt = await response_prompt(service.prompts, valid, rules)
        output_format = output_format_for(service.model, valid.chat, prompt)
        shown = service.model.tokenizer.special_ids(output_format.marks)
        record.warnings += valid.chat.conversation.warnings
        grammar = output_grammar_of(common, output_format, service.model.tokenizer)
        ready = await service.make_ready(common, [prompt], record, grammar)
        generation = service.generate(ready, record, shown=shown)
    del body, request  # they may be large, and the generation takes its time
    try:
        course = ResponseCourse(service, record, valid, output_format)
        if common.stream:
            opening = course.opening()
            return await stream_reply(service, record, common, generation, course, opening, course.last_words)
        return await _whole(service, record, ready, generation, course)
    except BaseException:  # also a cancellation: the client has left
        service.finish(generation, record)
        raise


async def _validated(
    service: Service, record: RequestRecord, request: ResponsesRequest, rules: Rules, num_bytes: int
) -> ValidResponse:
    before, previous = request.previous_response_id, []
    if before:
        stored = await service.responses.previous(record.key_id, before)
        if len(stored.items) + num_bytes > service.max_body_bytes:
            raise ContextLengthExceeded(
                f"the conversation has {len(stored.items)} bytes, and this request {num_bytes}; "
                f"together they may have {service.max_body_bytes}",
                param="previous_response_id",
            )
        with schema.without_collecting():
            previous = stored.conversation()
    given = input_items(request.input)
    if item_ids := references(given):
        given = resolved(given, await service.responses.items(record.key_id, item_ids))
    valid = validate_response(request, rules, service.model.template, previous, given)
    if valid.store:
        _check_conversation(msgspec.json.encode(valid.items))
    return valid


def _check_conversation(items: bytes) -> None:
    """What is kept is as quickly read as a body."""
    size = JsonSize()
    try:
        for begin in range(0, len(items), PIECE_BYTES):
            size.feed(items[begin : begin + PIECE_BYTES])
    except TooManyValuesError as error:
        raise TooManyValues(
            f'the conversation so far cannot be stored: {error} ("store": false keeps nothing)', param="input"
        ) from None


async def _whole(
    service: Service, record: RequestRecord, ready: ReadyRequest, generation: Generation, course: ResponseCourse
) -> Reply:
    if (
        ready.valid.logprobs.output >= 0
    ):  # piece by piece, as in a stream: so it shows which of them belong to the message
        while not generation.is_finished:
            for event in await generation.next_events():
                course.take(event)
    else:
        [answer] = await gather(generation)
        course.take(SequenceEvent(0, answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason))
    response = course.finished(service.usage(generation, record))
    service.finish(generation, record)
    if ready.grammar.checked_schema:
        for text in _texts(response):
            await service.schema_error(ready.grammar, record, text, generation.progress.finish_reasons[0])
    await course.keep()
    return Reply(response)


def _texts(response: bytes) -> list[str]:
    """The text of each message of a response."""
    items = msgspec.json.decode(response)["output"]
    return ["".join(part.get("text", "") for part in item["content"]) for item in items if item["type"] == "message"]


async def count_input_tokens(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The tokens that the prompt of a responses request has.

    Raises:
        ApiError: as the request itself would.
    """
    request = schema.decode(RESPONSES, body)
    rules = service.rules()
    valid = await _validated(service, record, request, rules, len(body))
    prompt = await response_prompt(service.prompts, valid, rules)
    return Reply(msgspec.json.encode(InputTokens(len(prompt))))
