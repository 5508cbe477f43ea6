"""A request for output at the engine: from its prompts to the end of its answer. Each API's handler goes like this:

    request = await read(...)                              body.py
    with await service.admit(record, ...) as admission:    a place in the queue, until the engine has the request
        valid = validate_...(request, admission.rules, ...)
        admission.hold(valid)
        prompt = await service.prompts...
        run = await submit(service, record, valid, [prompt])
    with run:                                              finished on every path, except while a stream goes on
        return Reply(... await run.answers() ...)          or run.streamed(writer)

A handler is called once and by nobody here; what an API's stream looks like, its `StreamWriter` knows.
"""

import asyncio
import struct
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import ClassVar, Protocol, Self

import structlog
from msgspec import structs

from penstock.frontend import schema
from penstock.frontend.api.grammar_part import Grammar
from penstock.frontend.api.logprobs import ScoreWriter
from penstock.frontend.api.service import Service
from penstock.frontend.api.usage import usage
from penstock.frontend.engine.generation import Generation, OutputRules, SequenceEvent, StopReason
from penstock.frontend.engine.scores import ShownToken
from penstock.frontend.errors import ApiError, InvalidRequest, UnsupportedParameter, from_exception
from penstock.frontend.exchange import sse
from penstock.frontend.exchange.exchange import exceeded
from penstock.frontend.exchange.replies import RequestRecord, StreamReply
from penstock.frontend.targets import NONE as NO_TARGETS
from penstock.frontend.text.stop_strings import StopStrings
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.beams import refuse_beside
from penstock.frontend.validation.common import ValidLogprobs, ValidRequest
from penstock.frontend.validation.tokens import bad_word_tokens, check_drawable
from penstock.ipc.messages import AddRequest, ImageRef, Pooling, SamplingParams

log = structlog.get_logger()

MAX_PROMPT_LOGPROBS = 1 << 19
"""Limit for all prompts of a request, top tokens included: about 50 MB, and a second to write the answer."""

_MANY_STOP_CHARACTERS = 1024

FIRST_TOKEN_WAIT_SECONDS = 1.0
"""How long a stream's status line waits, so that a refusal by the engine can still become a status code."""


@dataclass(slots=True)
class Answer:
    """One sequence's text, ids and finish reason."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: StopReason = None
    scores: list[ShownToken] = field(default_factory=list)
    schema_error: str = ""


class StreamWriter(Protocol):
    """Writes a stream in the form of an API."""

    keep_alive: ClassVar[bytes]
    """Shows the client that its request goes on, while there is nothing to write."""

    def event(self, event: SequenceEvent) -> bytes:
        """Write what has come; empty if nothing of it is certain yet."""

    async def end(self) -> bytes:
        """Write the end of a complete stream."""

    def failure(self, error: ApiError) -> bytes:
        """Write the end of a stream that fails after its first byte."""


@dataclass(slots=True)
class Run:
    """A request that has been submitted, until its answer ends. Use it in a `with`, which finishes it."""

    service: Service
    record: RequestRecord
    valid: ValidRequest
    prompts: list[list[int]]
    sampling: list[SamplingParams]  # one for each prompt
    grammar: Grammar
    generation: Generation
    _is_streamed: bool = field(default=False, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or not self._is_streamed:
            self.finish()

    def score_writer(self) -> ScoreWriter | None:
        """Return the writer of the answer's `logprobs`, if requested."""
        asked = self.valid.logprobs
        if asked.output < 0:
            return None
        return ScoreWriter(self.service.model.tokenizer, asked.output, as_token_ids=asked.as_token_ids)

    def usage(self) -> schema.Usage:
        """Tokens so far, and the other figures that the client asked for."""
        return usage(self.record, self.generation, self.valid, self.service.metrics.price_per_hour)

    async def final_usage(self) -> schema.Usage:
        """The usage once all sequences have ended, with the bill if the client asked for it."""
        if self.valid.return_bill:
            await self.generation.billed()
        return self.usage()

    def moments(self) -> tuple[float, float, float]:
        """Three times (`time.monotonic`): when the request got a row, when its first token came, and now."""
        progress, now = self.generation.progress, time.monotonic()
        begun = min(progress.submitted_at + progress.queue_seconds, now) if progress.submitted_at else now
        first = now if progress.first_token_at is None else max(progress.first_token_at, begun)
        return begun, first, now

    async def answers(self) -> list[Answer]:
        """Wait for the end of all sequences; return their answers in order of index.

        Raises:
            ApiError: if the generation failed.
        """
        texts: list[list[str]] = [[] for _ in range(self.generation.num_sequences)]
        answers = [Answer() for _ in texts]
        async for events in self.generation:
            for event in events:
                answer = answers[event.index]
                texts[event.index].append(event.text)
                answer.token_ids += event.token_ids
                answer.scores += event.scores or ()
                if event.finish_reason is not None:
                    answer.finish_reason, answer.stop_reason = event.finish_reason, event.stop_reason
        for answer, pieces in zip(answers, texts, strict=True):
            answer.text = "".join(pieces)
        return answers

    async def schema_error(self, text: str, finish_reason: str) -> str:
        """Validate a finished text whose schema could not be fully enforced; return the mismatch, or ""."""
        checked_schema = self.grammar.checked_schema
        if not checked_schema or finish_reason != "stop":
            return ""
        wrong = await self.service.grammars.mismatch(checked_schema, text, self.record.tenant)
        if wrong:
            self.record.warnings.append(f"schema_error: {wrong}")
        return wrong

    async def first_news(self) -> None:
        """Wait a moment for the first output, before a stream begins.

        Raises:
            ApiError: if the engine refused the request.
        """
        await self.generation.wait_first(FIRST_TOKEN_WAIT_SECONDS)

    def streamed(
        self, writer: StreamWriter, opening: bytes = b"", headers: Mapping[str, str] = sse.HEADERS
    ) -> StreamReply:
        """Reply with a stream, which finishes the run at its end. `opening`: its first bytes, before any output."""
        if self.record.targets is not None:
            self._warn()
        self._is_streamed = True
        pieces = self._written(writer, opening)
        return StreamReply(pieces, close=self.finish, headers=dict(headers), fail=self.generation.end)

    async def _written(self, writer: StreamWriter, unsent: bytes) -> AsyncGenerator[bytes, None]:
        """The pieces of a stream as they come: the opening, those of the output, the end."""
        try:
            if not self.generation.has_news:
                yield unsent or writer.keep_alive  # shows the client that its request was accepted
                unsent = b""
            async for events in self.generation:
                for event in events:
                    unsent += writer.event(event)
                if unsent or not events:
                    yield unsent or writer.keep_alive
                    unsent = b""
            yield await writer.end()
        except Exception as error:
            yield unsent + writer.failure(self._failed(error))
        finally:
            self.finish()

    def _failed(self, error: Exception) -> ApiError:
        """Record the error of a stream after its first byte; return it as clients are told."""
        if not isinstance(error, ApiError):
            log.error("stream failed", exc_info=error)
        self.record.error = from_exception(error)
        return self.record.error

    def finish(self) -> None:
        """Close the generation and record its outcome. Idempotent."""
        generation, record, progress = self.generation, self.record, self.generation.progress
        generation.close()
        if not self.service.generations.remove(generation):
            return
        if record.error is None and not generation.is_finished:
            record.error = generation.error  # recorded here too: the client may not have read it
        record.num_output_tokens = progress.num_output_tokens
        record.num_cached_tokens = progress.num_cached_tokens
        record.first_token_at = progress.first_token_at
        record.last_token_at = progress.last_token_at
        record.submitted_at = progress.submitted_at
        record.queue_seconds = progress.queue_seconds
        if record.targets is not None:
            self._warn()
            record.targets_met = progress.targets_met(record.targets, record.arrived, generation.num_sequences)
        reasons = progress.finish_reasons
        for _ in range(record.num_calling):  # the engine counts sequences ended by tool calls as "stop"
            reasons[reasons.index("stop")] = "tool_calls"
        record.finish_reasons = reasons + ["abort"] * (generation.num_sequences - len(reasons))
        record.bill, metrics = generation.bill, self.service.metrics
        record.engine = generation.bill.engine  # the request may have moved
        generation.bill.when_complete(partial(metrics.note_bill, record.key_id, generation.bill))

    def _warn(self) -> None:
        """Record a warning for the client if its request is served although it cannot meet its targets."""
        if late := self.generation.late:
            self.record.warnings.append(f"slo: {late}; it was served behind others")


async def submit(
    service: Service,
    record: RequestRecord,
    valid: ValidRequest,
    prompts: list[list[int]],
    *,
    images: tuple[ImageRef, ...] = (),
    shown: frozenset[int] = frozenset(),
    is_prompt_only: bool = False,
    poolings: Sequence[Pooling] = (),
) -> Run:
    """Parse the request's grammar and send it to the engine, one `AddRequest` per prompt.

    Warnings for the client are recorded. If this server is strict, the first one refuses the request.

    Args:
        service: with the engine.
        record: of the request.
        valid: what is asked for.
        prompts: token ids.
        images: in the only prompt.
        shown: special tokens that always stay in the text.
        is_prompt_only: no output is returned.
        poolings: what comes in place of tokens, for each prompt, if they differ.

    Raises:
        ContextLengthExceeded: if a prompt is too long.
        InvalidParameter: if no token is left to sample.
        InvalidRequest: if the grammar cannot be used, or too many log-probabilities of prompts are requested.
        UnsupportedParameter: if the server is strict and there is a warning.
        Overloaded: if too many grammars wait to be parsed.
        RateLimitExceeded: if the API key's tokens are used up.
        Unavailable: if the engine's queue cannot be reached.
    """
    if valid.beams is not None and images:
        raise UnsupportedParameter("images are not supported with use_beam_search", param="use_beam_search")
    if valid.beams is not None and valid.grammar is not None:
        refuse_beside(valid.grammar.field.partition(".")[0])
    grammar = Grammar() if valid.grammar is None else await service.grammars.read(valid.grammar, record.tenant)
    _check_prompt_size(valid.logprobs, prompts, valid.n)
    record.warnings += (*valid.warnings, *grammar.warnings)
    is_strict = service.config.frontend.strict_requests
    if is_strict and record.warnings:
        raise UnsupportedParameter(record.warnings[0], param=record.warnings[0].partition(":")[0])
    tokenizer = service.model.tokenizer
    sampling = await _sampling(tokenizer, valid, grammar, prompts, record.warnings, is_strict=is_strict)
    if poolings:
        pairs = zip(sampling, poolings, strict=True)
        sampling = [structs.replace(params, pooling=pooling) for params, pooling in pairs]
    rules = OutputRules(
        tokenizer=tokenizer,
        skip_special_tokens=valid.skip_special_tokens,
        shown=shown,
        stop=await _stop_strings(tokenizer, valid),
        include_stop=valid.include_stop,
        min_tokens=valid.sampling.min_tokens,
        is_prompt_only=is_prompt_only,
        reported_stop_token_ids=valid.user_stop_token_ids,
    )
    key_use, num_prompt_tokens = record.key_use, sum(len(prompt) for prompt in prompts)
    left = None if record.seconds is None else max(0.001, record.arrived + record.seconds - time.monotonic())
    requests = _requests(service, record, valid, prompts, sampling, images, left)
    if key_use is not None:
        key_use.use_prompt(num_prompt_tokens)
    record.num_prompt_tokens = num_prompt_tokens
    record.is_stream = valid.stream
    record.asked = valid
    record.adapter = "" if service.variant is None else service.variant.model.names[0]
    on_tokens = None if key_use is None else key_use.use_outputs
    source = service.engine if valid.beams is None else service.parts.searcher(valid.beams, service.engine)
    generation = Generation(source, requests, rules, service.metrics.inter_token_latency.note, on_tokens)
    run = Run(service, record, valid, prompts, sampling, grammar, generation)
    service.generations.add(generation)
    if left is not None and record.seconds is not None:
        generation.deadline = asyncio.get_running_loop().call_later(left, generation.end, exceeded(record.seconds))
    try:
        generation.start()
    except ApiError:
        run.finish()
        raise
    record.engine = generation.bill.engine
    return run


async def _sampling(
    tokenizer: TextTokenizer,
    valid: ValidRequest,
    grammar: Grammar,
    prompts: Sequence[Sequence[int]],
    warnings: list[str],
    *,
    is_strict: bool,
) -> list[SamplingParams]:
    """The request's parameters for each prompt, completed by what depends on it, on the tokenizer and the grammar."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    if valid.bad_words:
        bad_words = await tokenizer.off_loop(partial(bad_word_tokens, valid.bad_words, tokenizer))
    if valid.sampling.allowed_token_ids:
        check_drawable(valid.sampling, bad_words)
    limits = [valid.max_tokens_after(len(prompt), is_strict=is_strict) for prompt in prompts]
    for limit in limits:
        if valid.max_tokens is not None and limit < valid.max_tokens:
            field, asked = valid.max_tokens_field, valid.max_tokens
            warnings.append(f"{field}: {limit} instead of {asked}, because the context has no room for more")
    params = valid.sampling
    if valid.samplers is not None:
        params = await tokenizer.off_loop(partial(valid.samplers.applied, params, tokenizer))
    return [
        structs.replace(
            params,
            max_tokens=limit,
            bad_words=bad_words,
            grammar=grammar.text,
            grammar_bytes=grammar.num_bytes,
        )
        for limit in limits
    ]


async def _stop_strings(tokenizer: TextTokenizer, valid: ValidRequest) -> StopStrings | None:
    """The automaton of the stop strings; that of a thousand takes ten milliseconds."""
    if not valid.stop:
        return None
    make = partial(StopStrings, valid.stop, include_stop=valid.include_stop)
    return await tokenizer.off_loop(make) if sum(map(len, valid.stop)) > _MANY_STOP_CHARACTERS else make()


def _check_prompt_size(asked: ValidLogprobs, prompts: list[list[int]], n: int) -> None:
    """Refuse more log-probabilities of prompts than one answer should hold."""
    num_best = max(asked.prompt, asked.echo)
    total = sum(map(len, prompts)) * (1 + num_best) * n
    if num_best >= 0 and total > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"log-probabilities of prompts: {total} requested ({1 + num_best} for each token of each choice); "
            f"one answer holds at most {MAX_PROMPT_LOGPROBS}"
        )


def _requests(
    service: Service,
    record: RequestRecord,
    valid: ValidRequest,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    images: tuple[ImageRef, ...],
    seconds_left: float | None,
) -> list[AddRequest]:
    """The messages to the engine."""
    key_use, name, group = record.key_use, service.engine.name, service.generations.num_made
    if valid.targets is not None:
        record.targets = valid.targets.nearer(record.targets or valid.targets)
    targets = record.targets or NO_TARGETS
    waited_ms = (time.monotonic() - record.arrived) * 1e3
    return [
        AddRequest(
            request_id=f"{name}:{service.generations.next_number()}:{record.request_id}",
            prompt_token_ids=struct.pack(f"<{len(prompt)}i", *prompt),
            sampling=params,
            n=valid.num_sequences,
            priority=valid.priority,
            is_background=record.is_background,
            cache_salt=valid.cache_salt if key_use is None else key_use.salted(valid.cache_salt),
            tenant=record.tenant,
            weight=1.0 if key_use is None else key_use.key.weight,
            group=f"{name}:{group}",
            seconds_left=seconds_left or 0.0,
            ttft_left=max(0.001, (targets.ttft_ms - waited_ms) * 1e-3) if targets.ttft_ms < inf else 0.0,
            tpot=targets.tpot_ms * 1e-3 if targets.tpot_ms < inf else 0.0,
            images=images,
            adapter="" if service.variant is None else service.variant.adapter,
        )
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
