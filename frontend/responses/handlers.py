"""POST /v1/responses and /v1/responses/input_tokens"""

from functools import partial

import msgspec

from penstock.frontend.api.chat import prepared_chat
from penstock.frontend.api.run import Job, Prepared, Run, read, run
from penstock.frontend.api.service import PromptReader, Service
from penstock.frontend.api.truncation import fitting_prompt
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.errors import TooManyValues
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.heavy_turns import heavy_turn
from penstock.frontend.json_size import JsonSize, TooManyValuesError
from penstock.frontend.parsing.parser import OutputFormat
from penstock.frontend.prompt import Prompt
from penstock.frontend.responses.background import check_background, in_background
from penstock.frontend.responses.course import ResponseCourse
from penstock.frontend.responses.history import earlier_items, with_references
from penstock.frontend.responses.validate import ValidResponse, input_items, validate_response
from penstock.frontend.schema_responses import RESPONSES, InputTokens, ResponsesRequest
from penstock.frontend.validation.common import Rules


async def _job(service: Service, record: RequestRecord, request: ResponsesRequest, rules: Rules, num_bytes: int) -> Job:
    valid = await _validated(service, record, request, rules, num_bytes)

    async def prepare() -> Prepared:
        prompt = await _prompt(service.prompts, valid, rules, record)
        record.warnings += valid.chat.conversation.warnings
        return prepared_chat(service, valid.chat, prompt, partial(ResponseCourse, valid), partial(_whole, valid))

    return Job(valid.chat.common, prepare)


async def create_response(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """The handler.

    Raises:
        ApiError: before the first byte.
    """
    if b'"background"' not in body:
        return await run(RESPONSES, _job, service, record, body)
    begun: list[tuple[ResponseCourse, bool]] = []
    reply = await run(RESPONSES, partial(_perhaps_in_background, begun), service, record, body)
    if not (begun and isinstance(reply, StreamReply)):
        return reply
    [(course, is_streamed)] = begun
    return await in_background(reply, course, is_streamed=is_streamed)


async def _perhaps_in_background(
    begun: list[tuple[ResponseCourse, bool]],
    service: Service,
    record: RequestRecord,
    request: ResponsesRequest,
    rules: Rules,
    num_bytes: int,
) -> Job:
    """The request's job. A background response is always a stream; `begun` gets it, and whether the client wants it."""
    if not request.background:
        return await _job(service, record, request, rules, num_bytes)
    check_background(service, record, request)
    is_streamed, request.stream = request.stream is True, True
    valid = await _validated(service, record, request, rules, num_bytes)

    def begin(output_format: OutputFormat, run: Run) -> ResponseCourse:
        begun.append((ResponseCourse(valid, output_format, run), is_streamed))
        return begun[0][0]

    async def prepare() -> Prepared:
        prompt = await _prompt(service.prompts, valid, rules, record)
        record.warnings += valid.chat.conversation.warnings
        return prepared_chat(service, valid.chat, prompt, begin, partial(_whole, valid))

    return Job(valid.chat.common, prepare)


async def _validated(
    service: Service, record: RequestRecord, request: ResponsesRequest, rules: Rules, num_bytes: int
) -> ValidResponse:
    previous, num_before = await earlier_items(service, record, request, num_bytes)
    given = await with_references(service, record, input_items(request.input), num_before, num_bytes)
    await heavy_turn()  # a few bytes may have brought much along
    valid = validate_response(request, rules, service.model.template, previous, given)
    if valid.store:
        await heavy_turn()
        items = msgspec.json.encode(valid.items)
        await heavy_turn(len(items))
        _check_conversation(items)
    return valid


def _check_conversation(items: bytes) -> None:
    """Refuse items that, once stored, would take longer to read than a body may."""
    try:
        JsonSize().feed_all(items)
    except TooManyValuesError as error:
        raise TooManyValues(
            f'the conversation so far cannot be stored: {error} ("store": false keeps nothing)', param="input"
        ) from None


async def _whole(valid: ValidResponse, output_format: OutputFormat, run: Run) -> bytes:
    course, generation = ResponseCourse(valid, output_format, run), run.generation
    if run.ready.valid.logprobs.output >= 0:  # event by event, to see which of them belong to the message
        while not generation.is_finished:
            for event in await generation.next_events():
                course.take(event)
    else:
        [answer] = await run.answers()
        course.take(SequenceEvent(0, answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason))
    return await course.finished(await run.final_usage())


async def count_input_tokens(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The tokens that the prompt of a responses request has.

    Raises:
        ApiError: as the request itself would.
    """
    request = await read(RESPONSES, record, body)
    rules = service.rules()
    valid = await _validated(service, record, request, rules, len(body))
    record.warnings += (*valid.chat.conversation.warnings, *valid.chat.common.warnings)
    prompt = await _prompt(service.prompts, valid, rules, record)
    return Reply(msgspec.json.encode(InputTokens(len(prompt))))


async def _prompt(prompts: PromptReader, valid: ValidResponse, rules: Rules, record: RequestRecord) -> Prompt:
    """The prompt. With `truncation: auto`, the oldest turns are dropped until the rest fits; instructions stay.

    Raises:
        ContextLengthExceeded: if not even the last turn fits.
        TemplateFailed: if the template refuses the messages, or does not come to an end.
    """
    common, conversation = valid.chat.common, valid.chat.conversation
    if not valid.truncates:
        return common.truncated_chat(await prompts.render_and_encode(conversation, rules, record))
    return await fitting_prompt(prompts, common, conversation, rules, record)
