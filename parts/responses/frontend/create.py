"""POST /v1/responses and /v1/responses/input_tokens"""

import msgspec

from penstock.frontend.api.body import read
from penstock.frontend.api.chat import submit_chat
from penstock.frontend.api.run import Run
from penstock.frontend.api.service import PromptReader, Service
from penstock.frontend.api.truncation import fitting_prompt
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.errors import TooManyValues
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.heavy_turns import heavy_turn
from penstock.frontend.json_size import JsonSize, TooManyValuesError
from penstock.frontend.prompt import Prompt
from penstock.frontend.validation.common import Rules
from penstock.parts.responses.frontend.background import check_background, in_background
from penstock.parts.responses.frontend.history import earlier_items, with_references
from penstock.parts.responses.frontend.response_writer import ResponseWriter
from penstock.parts.responses.frontend.schema import RESPONSES, InputTokens, ResponsesRequest
from penstock.parts.responses.frontend.validate import ValidResponse, input_items, validate_response


async def create_response(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """The handler.

    Raises:
        ApiError: before the first byte.
    """
    request, num_bytes = await read(RESPONSES, record, body), len(body)
    service = await service.serving(request.model)
    with await service.admit(record, num_bytes) as admission:
        is_streamed = request.stream is True
        if request.background:
            check_background(service, record, request)
            request.stream = True  # even if the client does not want it
        valid = await _validated(service, record, request, admission.rules, num_bytes)
        admission.hold(valid.chat.common)
        del body, request  # they may be large
        prompt = await _prompt(service.prompts, valid, admission.rules, record)
        record.warnings += valid.chat.conversation.warnings
        run, output_format = await submit_chat(service, record, valid.chat, prompt)
    with run:
        writer = ResponseWriter(run, valid, output_format)
        if not run.valid.stream:
            return Reply(await _response(run, writer))
        await run.first_news()
        reply = run.streamed(writer, writer.opening())
        return await in_background(reply, writer, is_streamed=is_streamed) if valid.background else reply


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


async def _response(run: Run, writer: ResponseWriter) -> bytes:
    """The body of a complete answer."""
    if run.valid.logprobs.output >= 0:  # event by event, to see which of them belong to the message
        async for events in run.generation:
            for event in events:
                writer.take(event)
    else:
        [answer] = await run.answers()
        writer.take(SequenceEvent(0, answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason))
    return await writer.finished()


async def count_input_tokens(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The tokens that the prompt of a responses request has.

    Raises:
        ApiError: as the request itself would.
    """
    request = await read(RESPONSES, record, body)
    service = await service.serving(request.model)
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
