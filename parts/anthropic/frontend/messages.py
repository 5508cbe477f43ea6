"""POST /v1/messages and /v1/messages/count_tokens"""

import msgspec

from penstock.frontend.api.body import read
from penstock.frontend.api.chat import submit_chat
from penstock.frontend.api.service import Service
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.parts.anthropic.frontend.message_writer import MessageWriter
from penstock.parts.anthropic.frontend.schema import COUNT_TOKENS, MESSAGES, MessageTokensCount
from penstock.parts.anthropic.frontend.validate import validate_messages, validate_prompt


async def create_message(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """The handler.

    Raises:
        ApiError: before the first byte.
    """
    request, num_bytes = await read(MESSAGES, record, body), len(body)
    service = await service.serving(request.model)
    with await service.admit(record, num_bytes) as admission:
        valid = validate_messages(request, admission.rules, service.model)
        admission.hold(valid.chat.common)
        hides_thinking = valid.hides_thinking
        del body, request  # they may be large
        conversation = valid.chat.conversation
        record.warnings += conversation.warnings
        prompt = await service.prompts.render_and_encode(conversation, admission.rules, record)
        run, output_format = await submit_chat(service, record, valid.chat, prompt, is_prompt_only=valid.is_prompt_only)
    del valid, conversation  # it may be large too, and generating takes long
    with run:
        writer = MessageWriter(run, output_format, hides_thinking=hides_thinking)
        if not run.valid.stream:
            [answer] = await run.answers()
            writer.take(SequenceEvent(0, answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason))
            return Reply(await writer.finished())
        await run.first_news()
        return run.streamed(writer, writer.opening())


async def count_tokens(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The tokens that the prompt of a message has.

    Raises:
        ApiError: as the request itself would.
    """
    request = await read(COUNT_TOKENS, record, body)
    service = await service.serving(request.model)
    rules = service.rules()
    valid = validate_prompt(request, rules, service.model)
    record.warnings += (*valid.conversation.warnings, *valid.common.warnings)
    prompt = await service.prompts.render_and_encode(valid.conversation, rules, record)
    return Reply(msgspec.json.encode(MessageTokensCount(len(prompt))))
