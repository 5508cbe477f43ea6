"""POST /v1/chat/completions"""

import time

import msgspec
from msgspec import UNSET

from penstock.frontend import schema
from penstock.frontend.chunks import ChatChunks
from penstock.frontend.gathering import gather
from penstock.frontend.generation import Generation
from penstock.frontend.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.service import Service
from penstock.frontend.streaming import stream_reply
from penstock.frontend.text_prompt import render_and_encode
from penstock.frontend.validate import ValidRequest
from penstock.frontend.validate_chat import validate_chat


async def chat_completions(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """Answer a chat request.

    Raises:
        ApiError: before the first byte.
    """
    request = schema.decode(schema.CHAT, body)
    rules = await service.admit()
    valid = validate_chat(request, rules, service.model.template)
    prompt = await render_and_encode(service.model, valid.conversation, rules)
    generation = service.generate(valid.common, [prompt], record)
    try:
        if valid.common.stream:
            chunks = ChatChunks(
                f"chatcmpl-{record.request_id}",
                int(time.time()),
                valid.common.model,
                include_usage=valid.common.include_usage,
                token_ids=valid.common.return_token_ids,
            )
            opening = b"".join(
                chunks.role(index, prompt if valid.common.return_token_ids and index == 0 else None)
                for index in range(generation.num_sequences)
            )
            return await stream_reply(service, record, valid.common, generation, chunks, opening)
        return await _whole(service, record, valid.common, generation, prompt)
    except BaseException:  # also a cancellation: the client has left
        service.finish(generation, record)
        raise


async def _whole(
    service: Service, record: RequestRecord, valid: ValidRequest, generation: Generation, prompt: list[int]
) -> Reply:
    choices = [
        schema.ChatChoice(
            index=index,
            message=schema.ChatMessage(role="assistant", content=answer.text),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if valid.return_token_ids else UNSET,
        )
        for index, answer in enumerate(await gather(generation))
    ]
    completion = schema.ChatCompletion(
        id=f"chatcmpl-{record.request_id}",
        created=int(time.time()),
        model=valid.model,
        choices=choices,
        usage=service.usage(generation, record),
        prompt_token_ids=prompt if valid.return_token_ids else UNSET,
    )
    service.finish(generation, record)
    return Reply(msgspec.json.encode(completion))
