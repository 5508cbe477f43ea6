"""POST /v1/completions"""

import time
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from penstock.frontend import schema
from penstock.frontend.chunks import CompletionChunks
from penstock.frontend.gathering import Answer, gather
from penstock.frontend.generation import Generation
from penstock.frontend.logprobs import prompt_logprobs, score_writer
from penstock.frontend.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.scores import TokenScore, mean_logprob
from penstock.frontend.service import Service
from penstock.frontend.streaming import stream_reply
from penstock.frontend.text_prompt import encode_prompts
from penstock.frontend.validate_completion import ValidCompletion, validate_completion


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt as it runs, and what of it stands before each output: nothing, or its text if it is echoed."""

    token_ids: list[int]
    echo: str


async def completions(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """Answer a completions request.

    Raises:
        ApiError: before the first byte.
    """
    request = schema.decode(schema.COMPLETION, body)
    valid = validate_completion(request, await service.admit())
    common = valid.common
    prompts = await _prompts(service, valid)
    token_ids = [prompt.token_ids for prompt in prompts]
    generation = service.generate(common, token_ids, record, is_prompt_only=valid.is_prompt_only)
    try:
        if common.stream:
            chunks = CompletionChunks(
                f"cmpl-{record.request_id}",
                int(time.time()),
                common.model,
                include_usage=common.include_usage,
                token_ids=common.return_token_ids,
                scores=score_writer(service.model.tokenizer, common.logprobs),
            )
            opening = await _opening(service, chunks, valid, prompts, generation)
            return await stream_reply(service, record, common, generation, chunks, opening)
        return await _whole(service, record, valid, generation, prompts)
    except BaseException:  # also a cancellation: the client has left
        service.finish(generation, record)
        raise


async def _prompts(service: Service, valid: ValidCompletion) -> list[_Prompt]:
    encoded = await encode_prompts(service.model, valid)
    prompts = []
    for prompt, whole in zip(valid.prompts, encoded, strict=True):
        token_ids = valid.common.truncated(whole)
        echo = ""
        if valid.echo:
            if isinstance(prompt, str) and len(token_ids) == len(whole):
                echo = prompt
            else:
                echo = await service.model.tokenizer.decode_off_loop(token_ids)
        prompts.append(_Prompt(token_ids, echo))
    return prompts


async def _whole(
    service: Service, record: RequestRecord, valid: ValidCompletion, generation: Generation, prompts: list[_Prompt]
) -> Reply:
    common = valid.common
    answers = await gather(generation)
    told = await generation.prompt_scores()
    choices = []
    for i, prompt in enumerate(prompts):
        own = answers[i * common.num_sequences : (i + 1) * common.num_sequences]
        if common.num_sequences > common.n:
            own = sorted(own, key=lambda answer: mean_logprob(answer.scores), reverse=True)[: common.n]
        choices += [_choice(service, valid, i * common.n + k, prompt, answer, told[i]) for k, answer in enumerate(own)]
    completion = schema.Completion(
        id=f"cmpl-{record.request_id}",
        created=int(time.time()),
        model=common.model,
        choices=choices,
        usage=service.usage(generation, record),
    )
    service.finish(generation, record)
    return Reply(msgspec.json.encode(completion))


def _choice(
    service: Service, valid: ValidCompletion, index: int, prompt: _Prompt, answer: Answer, told: list[TokenScore]
) -> schema.CompletionChoice:
    common, tokenizer = valid.common, service.model.tokenizer
    return schema.CompletionChoice(
        index=index,
        text=prompt.echo + answer.text,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        logprobs=_logprobs(service, valid, prompt, answer, told),
        token_ids=answer.token_ids if common.return_token_ids else UNSET,
        prompt_token_ids=prompt.token_ids if common.return_token_ids else UNSET,
        prompt_logprobs=prompt_logprobs(tokenizer, common.logprobs, told),
    )


def _logprobs(
    service: Service, valid: ValidCompletion, prompt: _Prompt, answer: Answer | None, told: list[TokenScore]
) -> schema.CompletionLogprobs | None:
    """Of an echoed prompt and of an answer behind it, as far as there is one."""
    scores = score_writer(service.model.tokenizer, valid.common.logprobs)
    if scores is None:
        return None
    echoed = scores.echoed(prompt.token_ids, told, prompt.echo) if valid.echo else None
    return scores.completion([] if answer is None else answer.scores, len(prompt.echo), echoed)


async def _opening(
    service: Service, chunks: CompletionChunks, valid: ValidCompletion, prompts: list[_Prompt], generation: Generation
) -> bytes:
    """The chunks before any output: echoed prompts, and prompt ids if they were asked for."""
    common = valid.common
    if not (valid.echo or common.return_token_ids):
        return b""
    told = await generation.prompt_scores()
    return b"".join(
        chunks.prompt(
            prompt_index * common.n + sequence_idx,
            prompt.echo,
            prompt.token_ids if common.return_token_ids else None,
            _logprobs(service, valid, prompt, None, told[prompt_index]) if valid.echo else None,
        )
        for prompt_index, prompt in enumerate(prompts)
        for sequence_idx in range(common.n)
    )
