"""POST /v1/completions"""

import time
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from penstock.frontend import schema
from penstock.frontend.api.chunks import CompletionChunks
from penstock.frontend.api.gathering import Answer, gather
from penstock.frontend.api.logprobs import prompt_logprobs, score_writer
from penstock.frontend.api.service import Service
from penstock.frontend.api.stream_check import CheckedCompletionChunks, Collected, last_words
from penstock.frontend.api.streaming import stream_reply
from penstock.frontend.engine.generation import Generation
from penstock.frontend.engine.scores import mean_logprob
from penstock.frontend.errors import InvalidRequest
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.grammars.reader import Grammar
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.completion import ValidCompletion, validate_completion
from penstock.ipc.messages import TokenLogprobs

MAX_TOLD_TOKENS = 1 << 19
"""Of echoed prompts and their ids, in one answer."""


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
    record.warnings += schema.unknown_fields(schema.COMPLETION, body)
    valid = validate_completion(request, await service.admit(record))
    common = valid.common
    with service.place(record, common, body, len(valid.prompts)):
        prompts = await _prompts(service, valid)
        token_ids = [prompt.token_ids for prompt in prompts]
        _check_told(valid, token_ids)
        ready = await service.make_ready(common, token_ids, record, common.grammar)
        generation = service.generate(ready, record, is_prompt_only=valid.is_prompt_only)
    del body, request  # they may be large, and the generation takes its time
    try:
        if common.stream:
            kind = CheckedCompletionChunks if ready.grammar.checked_schema else CompletionChunks
            chunks = kind(
                f"cmpl-{record.request_id}",
                int(time.time()),
                common.model,
                fingerprint=service.fingerprint,
                include_usage=common.include_usage,
                token_ids=common.return_token_ids,
                scores=score_writer(service.model.tokenizer, common.logprobs),
            )
            opening = await _opening(service, chunks, valid, prompts, generation)
            before_end = None
            if isinstance(chunks, CheckedCompletionChunks):
                chunks.collected = Collected()
                before_end = last_words(service, record, ready.grammar, chunks)
            return await stream_reply(service, record, common, generation, chunks, opening, before_end)
        return await _whole(service, record, valid, ready.grammar, generation, prompts)
    except BaseException:  # also a cancellation: the client has left
        service.finish(generation, record)
        raise


def _check_told(valid: ValidCompletion, prompts: list[list[int]]) -> None:
    """Refuse to repeat more of the prompts than one answer should hold."""
    num_told = sum(map(len, prompts)) * valid.common.n * (valid.echo + valid.common.return_token_ids)
    if num_told > MAX_TOLD_TOKENS:
        raise InvalidRequest(
            f"echo and return_token_ids: {num_told} tokens of prompts would be told, for all choices together; "
            f"at most {MAX_TOLD_TOKENS} are told in one answer"
        )


async def _prompts(service: Service, valid: ValidCompletion) -> list[_Prompt]:
    encoded = await service.prompts.encode_prompts(valid)
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
    service: Service,
    record: RequestRecord,
    valid: ValidCompletion,
    grammar: Grammar,
    generation: Generation,
    prompts: list[_Prompt],
) -> Reply:
    common = valid.common
    answers = await gather(generation)
    for answer in answers:
        answer.schema_error = await service.schema_error(grammar, record, answer.text, answer.finish_reason)
    told = await generation.prompt_logprobs()
    usage = service.usage(generation, record)

    def write() -> bytes:
        choices = []
        for i, prompt in enumerate(prompts):
            own = answers[i * common.num_sequences : (i + 1) * common.num_sequences]
            if common.num_sequences > common.n:
                own = sorted(own, key=lambda answer: mean_logprob(answer.scores), reverse=True)[: common.n]
            scored = _Scored(service.model.tokenizer, valid, prompt, told[i])
            choices += [scored.choice(i * common.n + k, answer) for k, answer in enumerate(own)]
        return msgspec.json.encode(
            schema.Completion(
                id=f"cmpl-{record.request_id}",
                created=int(time.time()),
                model=common.model,
                choices=choices,
                usage=usage,
                system_fingerprint=service.fingerprint,
            )
        )

    body = await service.model.tokenizer.off_loop(write) if common.logprobs.asks else write()
    service.finish(generation, record)
    return Reply(body)


async def _opening(
    service: Service, chunks: CompletionChunks, valid: ValidCompletion, prompts: list[_Prompt], generation: Generation
) -> bytes:
    """The chunks before any output: echoed prompts, and prompt ids if they were asked for."""
    common = valid.common
    if not (valid.echo or common.return_token_ids):
        return b""
    told = await generation.prompt_logprobs()

    def write() -> bytes:
        opening = []
        for i, prompt in enumerate(prompts):
            logprobs = _Scored(service.model.tokenizer, valid, prompt, told[i]).of_prompt
            token_ids = prompt.token_ids if common.return_token_ids else None
            for k in range(common.n):
                opening.append(chunks.prompt(i * common.n + k, prompt.echo, token_ids, logprobs))
        return b"".join(opening)

    return await service.model.tokenizer.off_loop(write) if common.logprobs.asks else write()


class _Scored:
    """A prompt with all that is told of it, for its choices."""

    def __init__(
        self, tokenizer: TextTokenizer, valid: ValidCompletion, prompt: _Prompt, told: list[TokenLogprobs]
    ) -> None:
        self._valid = valid
        self._prompt = prompt
        self._writer = score_writer(tokenizer, valid.common.logprobs)
        self._prompt_logprobs = prompt_logprobs(tokenizer, valid.common.logprobs, told)
        self.of_prompt: schema.CompletionLogprobs | None = None  # if it is echoed
        if self._writer is not None and valid.echo:
            self.of_prompt = self._writer.echoed(prompt.token_ids, told, prompt.echo)

    def choice(self, index: int, answer: Answer) -> schema.CompletionChoice:
        """A whole answer behind the prompt."""
        prompt, is_with_ids = self._prompt, self._valid.common.return_token_ids
        logprobs = None
        if self._writer is not None:
            logprobs = self._writer.completion(answer.scores, len(prompt.echo), self.of_prompt)
        return schema.CompletionChoice(
            index=index,
            text=prompt.echo + answer.text,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            logprobs=logprobs,
            token_ids=answer.token_ids if is_with_ids else None,
            prompt_token_ids=prompt.token_ids if is_with_ids else None,
            prompt_logprobs=self._prompt_logprobs,
            schema_error=answer.schema_error or UNSET,
        )
