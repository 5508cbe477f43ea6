"""POST /v1/messages and /v1/messages/count_tokens"""

from dataclasses import replace
from functools import partial

import msgspec

from penstock.frontend.anthropic.course import FRAMING, MessageCourse
from penstock.frontend.anthropic.schema import COUNT_TOKENS, MESSAGES, MessagesRequest, MessageTokensCount
from penstock.frontend.anthropic.validate import ValidMessages, validate_messages, validate_prompt
from penstock.frontend.api.chat import prepared_chat
from penstock.frontend.api.run import Job, Prepared, Run, read, run
from penstock.frontend.api.service import Service
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.parsing.parser import OutputFormat
from penstock.frontend.validation.common import Rules


async def _job(service: Service, record: RequestRecord, request: MessagesRequest, rules: Rules, num_bytes: int) -> Job:
    valid = validate_messages(request, rules, service.model)

    async def prepare() -> Prepared:
        conversation = valid.chat.conversation
        record.warnings += conversation.warnings
        prompt = await service.prompts.render_and_encode(conversation, rules, record)
        prepared = prepared_chat(service, valid.chat, prompt, partial(MessageCourse, valid), partial(_whole, valid))
        return replace(prepared, is_prompt_only=valid.is_prompt_only, framing=FRAMING)

    return Job(valid.chat.common, prepare)


create_message = partial(run, MESSAGES, _job)
"""The handler."""


async def _whole(valid: ValidMessages, output_format: OutputFormat, run: Run) -> bytes:
    course = MessageCourse(valid, output_format, run)
    [answer] = await run.answers()
    course.take(SequenceEvent(0, answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason))
    return await course.finished()


async def count_tokens(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The tokens that the prompt of a message has.

    Raises:
        ApiError: as the request itself would.
    """
    request = await read(COUNT_TOKENS, record, body)
    rules = service.rules()
    valid = validate_prompt(request, rules, service.model)
    record.warnings += (*valid.conversation.warnings, *valid.common.warnings)
    prompt = await service.prompts.render_and_encode(valid.conversation, rules, record)
    return Reply(msgspec.json.encode(MessageTokensCount(len(prompt))))
