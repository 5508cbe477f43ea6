"""POST /v1/completions"""

import time

import msgspec
from msgspec import UNSET

from penstock.frontend import schema
from penstock.frontend.chunks import CompletionChunks
from penstock.frontend.gathering import gather
from penstock.frontend.generation import Generation
from penstock.frontend.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.service import Service
from penstock.frontend.streaming import stream_reply
from penstock.frontend.text_prompt import encode_prompts
from penstock.frontend.validate import ValidCompletion, validate_completion


async def completions(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """Answer a completions request.

    Raises:
        ApiError: before the first byte.
    """
    request = schema.decode(schema.COMPLETION, body)
    valid = validate_completion(request, await service.admit())
    prompts = await encode_prompts(service.model, valid)
    echoes = await _echoes(service, valid)
    generation = service.generate(valid.common, prompts, record)
    try:
        if valid.common.stream:
            chunks = CompletionChunks(
                f"cmpl-{record.request_id}",
                int(time.time()),
                valid.common.model,
                include_usage=valid.common.include_usage,
                token_ids=valid.common.return_token_ids,
            )
            opening = _opening(chunks, valid, prompts, echoes)
            return await stream_reply(service, record, valid.common, generation, chunks, opening)
        return await _whole(service, record, valid, generation, prompts, echoes)
    except BaseException:  # also a cancellation: the client has left
        service.finish(generation, record)
        raise


async def _echoes(service: Service, valid: ValidCompletion) -> list[str]:
    """What stands before each prompt's output: nothing, or with `echo` the prompt's text."""
    if not valid.echo:
        return [""] * len(valid.prompts)
    return [
        prompt if isinstance(prompt, str) else await service.model.tokenizer.decode_off_loop(prompt)
        for prompt in valid.prompts
    ]


async def _whole(
    service: Service,
    record: RequestRecord,
    valid: ValidCompletion,
    generation: Generation,
    prompts: list[list[int]],
    echoes: list[str],
) -> Reply:
    common = valid.common
    choices = [
        schema.CompletionChoice(
            index=index,
            text=echoes[index // common.n] + answer.text,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if common.return_token_ids else UNSET,
            prompt_token_ids=prompts[index // common.n] if common.return_token_ids else UNSET,
        )
        for index, answer in enumerate(await gather(generation))
    ]
    completion = schema.Completion(
        id=f"cmpl-{record.request_id}",
        created=int(time.time()),
        model=common.model,
        choices=choices,
        usage=service.usage(generation, record),
    )
    service.finish(generation, record)
    return Reply(msgspec.json.encode(completion))


def _opening(chunks: CompletionChunks, valid: ValidCompletion, prompts: list[list[int]], echoes: list[str]) -> bytes:
    """The chunks before any output: echoed prompts, and prompt ids if they were asked for."""
    common = valid.common
    if not (valid.echo or common.return_token_ids):
        return b""
    return b"".join(
        chunks.prompt(
            prompt_index * common.n + sequence_idx,
            echoes[prompt_index],
            prompts[prompt_index] if common.return_token_ids else None,
        )
        for prompt_index in range(len(prompts))
        for sequence_idx in range(common.n)
    )
