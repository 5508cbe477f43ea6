"""POST /v1/responses and /v1/responses/input_tokens"""

from functools import partial

import msgspec

from penstock.frontend import schema
from penstock.frontend.api.chat import prepared_chat
from penstock.frontend.api.run import Job, Prepared, Run, run
from penstock.frontend.api.service import Service
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.errors import ContextLengthExceeded, TooManyValues
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.json_size import PIECE_BYTES, JsonSize, TooManyValuesError
from penstock.frontend.parsing.output_format import OutputFormat
from penstock.frontend.responses.course import ResponseCourse
from penstock.frontend.responses.items import references, resolved
from penstock.frontend.responses.prompt import response_prompt
from penstock.frontend.responses.validate import ValidResponse, input_items, validate_response
from penstock.frontend.schema_responses import RESPONSES, InputTokens, ResponsesRequest
from penstock.frontend.validation.common import Rules


async def _job(service: Service, record: RequestRecord, request: ResponsesRequest, rules: Rules, num_bytes: int) -> Job:
    valid = await _validated(service, record, request, rules, num_bytes)

    async def prepare() -> Prepared:
        prompt = await response_prompt(service.prompts, valid, rules)
        record.warnings += valid.chat.conversation.warnings
        return prepared_chat(service, valid.chat, prompt, partial(ResponseCourse, valid), partial(_whole, valid))

    return Job(valid.chat.common, prepare)


create_response = partial(run, RESPONSES, _job)
"""The handler."""


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


async def _whole(valid: ValidResponse, output_format: OutputFormat, run: Run) -> bytes:
    course, generation = ResponseCourse(valid, output_format, run), run.generation
    if run.ready.valid.logprobs.output >= 0:  # piece by piece: so it shows which of them belong to the message
        while not generation.is_finished:
            for event in await generation.next_events():
                course.take(event)
    else:
        [answer] = await run.answers()
        course.take(SequenceEvent(0, answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason))
    return await course.finished(run.usage())


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
