"""POST /v1/completions"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET

from penstock.frontend import schema
from penstock.frontend.api.body import read
from penstock.frontend.api.chunks import ChunkWriter
from penstock.frontend.api.infill import filled_prompts, infill_format, with_ends
from penstock.frontend.api.logprobs import prompt_logprobs
from penstock.frontend.api.run import Answer, Run, submit
from penstock.frontend.api.service import Service
from penstock.frontend.draws_and_clock import CLOCK
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.engine.scores import mean_logprob
from penstock.frontend.errors import InvalidRequest
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.validation.completion import ValidCompletion, validate_completion
from penstock.ipc.messages import TokenLogprobs

_encode = msgspec.json.encode

MAX_TOLD_TOKENS = 1 << 19
"""Limit for echoed prompts and prompt ids in one answer."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A submitted prompt, and the text shown before each output: the prompt's if it is echoed, else none."""

    token_ids: list[int]
    echo: str


async def completions(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """The handler.

    Raises:
        ApiError: before the first byte.
    """
    request, num_bytes = await read(schema.COMPLETION, record, body), len(body)
    service = await service.serving(request.model)
    with await service.admit(record, num_bytes) as admission:
        valid = validate_completion(request, admission.rules)
        if valid.suffix:
            infill = infill_format(service, "suffix")
            valid = replace(valid, common=with_ends(valid.common, infill, ignore_eos=bool(request.ignore_eos)))
        admission.hold(valid.common, len(valid.prompts))
        del body, request  # they may be large
        prompts = await _prompts(service, valid, record.tenant)
        token_ids = [prompt.token_ids for prompt in prompts]
        _check_told(valid, token_ids)
        run = await submit(service, record, valid.common, token_ids, is_prompt_only=valid.is_prompt_only)
    with run:
        if not valid.common.stream:
            return Reply(await _completion(run, valid, prompts))
        chunks = CompletionChunks(run)
        await run.first_news()
        return run.streamed(chunks, await _opening(run, valid, prompts, chunks))


def _check_told(valid: ValidCompletion, prompts: list[list[int]]) -> None:
    """Refuse to return more of the prompts than one answer should hold."""
    num_told = sum(map(len, prompts)) * valid.common.n * (valid.echo + valid.common.return_token_ids)
    if num_told > MAX_TOLD_TOKENS:
        raise InvalidRequest(
            f"echo and return_token_ids: the answer would hold {num_told} prompt tokens, over all choices; "
            f"at most {MAX_TOLD_TOKENS} are allowed"
        )


async def _prompts(service: Service, valid: ValidCompletion, client: str) -> list[_Prompt]:
    if valid.suffix:
        return [_Prompt(ids, "") for ids in await filled_prompts(service, valid, client)]
    encoded = await service.prompts.encode_prompts(valid, client)
    prompts = []
    for prompt, whole in zip(valid.prompts, encoded, strict=True):
        token_ids = valid.common.truncated(whole)
        echo = ""
        if valid.echo:
            if isinstance(prompt, str) and len(token_ids) == len(whole):
                echo = prompt
            else:
                echo = await service.prompts.decode(token_ids, client)
        prompts.append(_Prompt(token_ids, echo))
    return prompts


async def _completion(run: Run, valid: ValidCompletion, prompts: list[_Prompt]) -> bytes:
    """The body of a complete answer."""
    service, common = run.service, valid.common
    answers = await run.answers()
    for answer in answers:
        answer.schema_error = await run.schema_error(answer.text, answer.finish_reason)
    told = await run.generation.prompt_logprobs()
    usage = await run.final_usage()

    def write() -> bytes:
        choices = []
        for i, prompt in enumerate(prompts):
            own = answers[i * common.num_sequences : (i + 1) * common.num_sequences]
            if common.num_sequences > common.n:
                own = sorted(own, key=lambda answer: mean_logprob(answer.scores), reverse=True)[: common.n]
            scored = _Scored(run, valid, prompt, told[i])
            choices += [scored.choice(i * common.n + k, answer) for k, answer in enumerate(own)]
        return msgspec.json.encode(
            schema.Completion(
                id=f"cmpl-{run.record.request_id}",
                created=int(CLOCK.get()()),
                model=common.model,
                choices=choices,
                usage=usage,
                system_fingerprint=service.fingerprint,
            )
        )

    return await service.model.tokenizer.off_loop(write) if common.logprobs.asks else write()


class CompletionChunks(ChunkWriter):
    """text_completion events."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    nothing: ClassVar[dict[str, object]] = {"text": ""}

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._starts: dict[int, int] = {}  # characters of an echoed prompt before a choice's output
        self._after = b',"logprobs":null,"finish_reason":null}]' + self._no_usage

    def prompt(
        self,
        index: int,
        text: str,
        prompt_token_ids: list[int] | None,
        logprobs: schema.CompletionLogprobs | None = None,
    ) -> bytes:
        """A choice's first chunk, if its prompt is echoed or its prompt ids are requested."""
        self._starts[index] = len(text)
        ids = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + _encode(prompt_token_ids)
        rest = b',"logprobs":' + _encode(logprobs) + b',"finish_reason":null' + ids + b"}]" + self._no_usage
        return self._start(index) + _encode(text) + rest

    def event(self, event: SequenceEvent) -> bytes:
        """The chunk of an event; empty if there is nothing to show yet."""
        if self._is_checked:
            self._collect(event)
        scores = event.scores if self._scores is not None else None
        if event.finish_reason is None and not (self._has_usage or self._token_ids or scores):
            return self._start(event.index) + _encode(event.text) + self._after if event.text else b""
        if not (event.text or event.finish_reason or scores or (self._token_ids and event.token_ids)):
            return b""
        fields: dict[str, Any] = {"text": event.text}
        if self._token_ids:
            fields["token_ids"] = event.token_ids
        if self._scores is not None and scores:
            fields["logprobs"] = self._scores.completion(scores, self._starts.get(event.index, 0))
        return self._head + b',"choices":[' + self._choice(event, fields) + b"]" + self._tail()

    def _start(self, index: int) -> bytes:
        before = self._before.get(index)
        if before is None:
            before = self._before[index] = self._head + b',"choices":[{"index":%d,"text":' % index
        return before


async def _opening(run: Run, valid: ValidCompletion, prompts: list[_Prompt], chunks: CompletionChunks) -> bytes:
    """The chunks before any output: echoed prompts, and prompt ids if requested."""
    service, common = run.service, valid.common
    if not (valid.echo or common.return_token_ids):
        return b""
    told = await run.generation.prompt_logprobs()

    def write() -> bytes:
        opening = []
        for i, prompt in enumerate(prompts):
            logprobs = _Scored(run, valid, prompt, told[i]).of_prompt
            token_ids = prompt.token_ids if common.return_token_ids else None
            for k in range(common.n):
                opening.append(chunks.prompt(i * common.n + k, prompt.echo, token_ids, logprobs))
        return b"".join(opening)

    return await service.model.tokenizer.off_loop(write) if common.logprobs.asks else write()


class _Scored:
    """A prompt with everything that its choices return about it."""

    def __init__(self, run: Run, valid: ValidCompletion, prompt: _Prompt, told: list[TokenLogprobs]) -> None:
        self._valid = valid
        self._prompt = prompt
        self._writer = run.score_writer()
        self._prompt_logprobs = prompt_logprobs(run.service.model.tokenizer, valid.common.logprobs, told)
        self.of_prompt: schema.CompletionLogprobs | None = None  # set if the prompt is echoed
        if self._writer is not None and valid.echo:
            self.of_prompt = self._writer.echoed(prompt.token_ids, told, prompt.echo)

    def choice(self, index: int, answer: Answer) -> schema.CompletionChoice:
        """A complete answer, after its prompt."""
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
