"""A request for output, from its body to the end of its answer; chats, completions and responses share this path.

    body --decode, admit, validate--> Job --prompts, grammar--> Prepared --submit--> Run --stream or gather--> answer

Each API puts its own code into the functions that `Job` and `Prepared` hold, and into its `Chunks`.
"""

import asyncio
import re
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import ClassVar, Protocol, TypeVar

import msgspec
import structlog
from msgspec.structs import asdict

from penstock.frontend import schema
from penstock.frontend.api.logprobs import ScoreWriter
from penstock.frontend.api.service import Service
from penstock.frontend.api.usage import usage
from penstock.frontend.draws import CLOCK
from penstock.frontend.engine.generation import Generation, OutputRules, SequenceEvent, StopReason
from penstock.frontend.engine.scores import ShownToken
from penstock.frontend.errors import (
    ApiError,
    InvalidParameter,
    InvalidRequest,
    MalformedBody,
    UnsupportedParameter,
    from_exception,
)
from penstock.frontend.exchange import sse
from penstock.frontend.exchange.exchange import exceeded
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.grammars.reader import Grammar, GrammarSource
from penstock.frontend.heavy_turns import heavy_turn
from penstock.frontend.targets import NONE as NO_TARGETS
from penstock.frontend.text.stop_strings import StopStrings
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.common import Rules, ValidLogprobs, ValidRequest, without_collecting
from penstock.frontend.validation.foreign_fields import take_foreign_fields
from penstock.frontend.validation.tokens import bad_word_tokens, check_drawable
from penstock.ipc.messages import AddRequest, ImageRef, SamplingParams

log = structlog.get_logger()

Q = TypeVar("Q", bound=msgspec.Struct)

_encode = msgspec.json.encode

MAX_PROMPT_LOGPROBS = 1 << 19
"""Limit for all prompts of a request, top tokens included: about 50 MB, and a second to write the answer."""

_MAX_COMPLAINT = 200
"""The longest message about a field of the wrong type, in characters."""

_OBJECT_ERRORS = {"missing required": "is required", "contains unknown": "is an unknown field"}
"""What is wrong with a body's fields, by msgspec's words for it."""
_OF_AN_OBJECT = re.compile(rf"Object ({'|'.join(_OBJECT_ERRORS)}) field `(.*)`", re.DOTALL)

_WHOLE_NUMBER = re.compile(rb"(-?[0-9]{1,19})\.0{1,9}")

_MANY_STOP_CHARACTERS = 1024

FIRST_TOKEN_WAIT_SECONDS = 1.0
"""How long a stream's status line waits, so that a refusal by the engine can still become a status code."""


class Chunks(Protocol):
    """Produces the bytes of one stream."""

    async def opening(self) -> bytes:
        """The bytes before any output; called when output begins, or after FIRST_TOKEN_WAIT_SECONDS without any."""
        ...

    def event(self, event: SequenceEvent, usage: schema.Usage | None = None) -> bytes:
        """The chunk of an event; empty if there is nothing to show."""
        ...

    async def end(self, usage: schema.Usage | None) -> bytes:
        """The end of a complete stream, with the whole request's usage if given."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        ...


@dataclass(slots=True)
class Answer:
    """One sequence's text, ids and finish reason."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: StopReason = None
    scores: list[ShownToken] = field(default_factory=list)
    schema_error: str = ""


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """Everything that is sent to the engine about a request."""

    valid: ValidRequest
    prompts: list[list[int]]
    sampling: list[SamplingParams]  # one for each prompt
    grammar: Grammar
    stop: StopStrings | None
    images: tuple[ImageRef, ...] = ()  # in the only prompt


@dataclass(frozen=True, slots=True)
class Run:
    """A request that has been submitted, until its answer ends."""

    service: Service
    record: RequestRecord
    ready: ReadyRequest
    generation: Generation

    def score_writer(self) -> ScoreWriter | None:
        """Return the writer of the answer's `logprobs`, if requested."""
        asked = self.ready.valid.logprobs
        if asked.output < 0:
            return None
        return ScoreWriter(self.service.model.tokenizer, asked.output, as_token_ids=asked.as_token_ids)

    def usage(self) -> schema.Usage:
        """Tokens so far, and the other figures that the client asked for."""
        return usage(self.record, self.generation, self.ready.valid, self.service.metrics.price_per_hour)

    async def final_usage(self) -> schema.Usage:
        """The usage once all sequences have ended, with the bill if the client asked for it."""
        if self.ready.valid.return_bill:
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
        generation = self.generation
        texts: list[list[str]] = [[] for _ in range(generation.num_sequences)]
        answers = [Answer() for _ in texts]
        while not generation.is_finished:
            for event in await generation.next_events():
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
        checked_schema = self.ready.grammar.checked_schema
        if not checked_schema or finish_reason != "stop":
            return ""
        wrong = await self.service.grammars.mismatch(checked_schema, text, self.record.tenant)
        if wrong:
            self.record.warnings.append(f"schema_error: {wrong}")
        return wrong

    def warn(self) -> None:
        """Record a warning for the client if its request is served although it cannot meet its targets."""
        if late := self.generation.late:
            self.record.warnings.append(f"slo: {late}; it was served behind others")

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
            self.warn()
            record.targets_met = progress.targets_met(record.targets, record.arrived, generation.num_sequences)
        reasons = progress.finish_reasons
        for _ in range(record.num_calling):  # the engine counts sequences ended by tool calls as "stop"
            reasons[reasons.index("stop")] = "tool_calls"
        record.finish_reasons = reasons + ["abort"] * (generation.num_sequences - len(reasons))
        record.bill, metrics = generation.bill, self.service.metrics
        record.engine = generation.bill.engine  # the request may have moved
        generation.bill.when_complete(partial(metrics.note_bill, record.key_id, generation.bill))


class ChunkWriter:
    """The shared part of chat and completion streams, made for little work per token.

    Everything but the text is the same for all chunks of a sequence, so it is encoded once. A chunk is then
    prefix + text as JSON + suffix.
    """

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    nothing: ClassVar[dict[str, object]]  # the fields of a choice that has no new text

    def __init__(self, run: Run) -> None:
        self.run = run
        valid = run.ready.valid
        head = {
            "id": f"{self.id_prefix}-{run.record.request_id}",
            "object": self.object_name,
            "created": int(CLOCK.get()()),
            "model": valid.model,
            "system_fingerprint": run.service.fingerprint,
        }
        self._head = sse.PREFIX + _encode(head)[:-1]  # without the closing brace
        self._no_usage = b',"usage":null}' + sse.SUFFIX if valid.include_usage else b"}" + sse.SUFFIX
        self._token_ids = valid.return_token_ids
        self._scores = run.score_writer()  # None: not requested
        self._before: dict[int, bytes] = {}  # the bytes before a choice's text
        self._is_checked = bool(run.ready.grammar.checked_schema)
        self._texts: dict[int, list[str]] = {}
        self._finish_reasons: dict[int, str] = {}

    def _collect(self, event: SequenceEvent) -> None:
        """Record output whose schema could not be fully enforced: it is validated at the end."""
        self._texts.setdefault(event.index, []).append(event.text)
        if event.finish_reason is not None:
            self._finish_reasons[event.index] = event.finish_reason

    def _choice(self, event: SequenceEvent, fields: Mapping[str, object]) -> bytes:
        """A choice with its end, if it has one."""
        choice = {"index": event.index, "logprobs": None, **fields, "finish_reason": event.finish_reason}
        if event.finish_reason is not None:
            choice["stop_reason"] = event.stop_reason
        return _encode(choice)

    def _tail(self, usage: schema.Usage | None) -> bytes:
        return self._no_usage if usage is None else b',"usage":' + _encode(usage) + b"}" + sse.SUFFIX

    async def end(self, usage: schema.Usage | None) -> bytes:
        """The end of a complete stream.

        Includes a chunk for each finished text that does not match its schema, and one with usage if requested.
        """
        end = b""
        for index, reason in sorted(self._finish_reasons.items()):
            if wrong := await self.run.schema_error("".join(self._texts[index]), reason):
                choice = {"index": index, **self.nothing, "logprobs": None, "finish_reason": None}
                end += self._head + b',"choices":[' + _encode(choice | {"schema_error": wrong}) + b"]" + self._no_usage
        if usage is not None:
            end += self._head + b',"choices":[],"usage":' + _encode(usage) + b"}" + sse.SUFFIX
        return end + sse.DONE

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        return sse.error_event(error)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is to be computed, and how the answer is written."""

    prompts: list[list[int]]
    grammar: GrammarSource | None
    chunks: Callable[[Run], Chunks]  # for a stream
    whole: Callable[[Run], Awaitable[bytes]]  # the body of a complete answer
    shown: frozenset[int] = frozenset()
    is_prompt_only: bool = False
    framing: sse.Framing = sse.FRAMING
    images: tuple[ImageRef, ...] = ()  # in the only prompt


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request."""

    valid: ValidRequest
    prepare: Callable[[], Awaitable[Prepared]]
    num_prompts: int = 1


Validate = Callable[[Service, RequestRecord, Q, Rules, int], Awaitable[Job]]
"""Validates a decoded request; the last argument is the size of its body in bytes."""


async def run(
    decoder: msgspec.json.Decoder[Q], validate: Validate[Q], service: Service, record: RequestRecord, body: bytes
) -> Reply | StreamReply:
    """Answer a request.

    Raises:
        ApiError: if the request fails before the first byte of its answer.
    """
    num_bytes = len(body)
    request = await read(decoder, record, body)
    rules = await service.admit(record)
    job = await validate(service, record, request, rules, num_bytes)
    del body, request  # they may be large
    with service.reserve(record, job.valid, num_bytes, job.num_prompts):
        prepared = await job.prepare()
        ready = await make_ready(service, job.valid, prepared.prompts, record, prepared.grammar)
        if prepared.images:
            ready = replace(ready, images=prepared.images)
        shown, is_prompt_only = prepared.shown, prepared.is_prompt_only
        task = submit(service, record, ready, shown=shown, is_prompt_only=is_prompt_only)
    del job  # its conversation may be large too, and generating takes long
    try:
        if ready.valid.stream:
            chunks = prepared.chunks(task)
            await task.generation.wait_first(FIRST_TOKEN_WAIT_SECONDS)
            opening = await chunks.opening()
            if task.record.targets is not None:
                task.warn()
            framing = prepared.framing
            stream = _stream(task, chunks, opening, framing.keep_alive)
            return StreamReply(stream, close=task.finish, headers=dict(framing.headers), fail=task.generation.end)
        answer = await prepared.whole(task)
        task.finish()
        return Reply(answer)
    except BaseException:  # including a cancellation: the client has left
        task.finish()
        raise


async def read(decoder: msgspec.json.Decoder[Q], record: RequestRecord, body: bytes) -> Q:
    """Decode a body, and note what is told about fields that its route does not have (see `foreign_fields.py`).

    For a large body, each of these steps has a turn of its own; then it yields to other tasks, because the next steps
    are large, too.

    Raises:
        ApiError: as `decode`; UnsupportedParameter: a field asks for what does not exist here.
    """
    await heavy_turn(len(body))
    request = decode(decoder, body)
    await heavy_turn(len(body))
    record.warnings += _take_others(request, body)
    await heavy_turn(len(body))
    return request


def decode(decoder: msgspec.json.Decoder[Q], body: bytes) -> Q:
    """Decode a request.

    Raises:
        MalformedBody: if the body is not a JSON object.
        InvalidParameter: if a field has the wrong type; names the field.
    """
    try:
        with without_collecting():
            return decoder.decode(body)
    except msgspec.ValidationError as error:
        what, found, path = str(error).rpartition(" - at `")
        if what.endswith("got `float`") and (whole := _with_whole_numbers(body)):
            return decode(decoder, whole)
        if not found and (named := _OF_AN_OBJECT.fullmatch(path)):
            field = _cut(named[2])
            raise InvalidParameter(f"{field} {_OBJECT_ERRORS[named[1]]}", param=field) from None
        if not found:
            raise MalformedBody(f"the body must be a JSON object: {_cut(path)}") from None
        field = path.rstrip("`").removeprefix("$").lstrip(".")
        raise InvalidParameter(f"{field}: {what[:1].lower()}{_cut(what[1:])}", param=field) from None
    except RecursionError:
        raise MalformedBody("the body is not valid JSON: nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the body is not valid JSON in UTF-8: {error}") from None


def _with_whole_numbers(body: bytes) -> bytes:
    """The body with 3 for a field's 3.0, which is how some languages write integers; empty if there is none."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return b""  # the error that has been found is told
    whole = {name: found[1] for name, raw in fields.items() if (found := _WHOLE_NUMBER.fullmatch(bytes(raw)))}
    return _encode(fields | {name: msgspec.Raw(number) for name, number in whole.items()}) if whole else b""


def _cut(complaint: str) -> str:
    """Shorten a message: it may quote a long name from the body."""
    return complaint if len(complaint) <= _MAX_COMPLAINT else f"{complaint[:_MAX_COMPLAINT]}…"


def _take_others(request: msgspec.Struct, body: bytes) -> list[str]:
    try:
        return take_foreign_fields(request, msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    except RecursionError:  # in a field that the request's decoder has passed over
        raise MalformedBody("the body is not valid JSON: nested too deeply") from None


async def make_ready(
    service: Service, valid: ValidRequest, prompts: list[list[int]], record: RequestRecord, source: GrammarSource | None
) -> ReadyRequest:
    """Combine a valid request with its prompts, and parse its grammar.

    Warnings for the client are recorded. If this server is strict, the first one refuses the request.

    Raises:
        ContextLengthExceeded: if a prompt is too long.
        InvalidParameter: if no token is left to sample.
        InvalidRequest: if the grammar cannot be used, or too many log-probabilities of prompts are requested.
        UnsupportedParameter: if the server is strict and there is a warning.
        Overloaded: if too many grammars wait to be parsed.
    """
    grammar = Grammar() if source is None else await service.grammars.read(source, record.tenant)
    warnings, is_strict = record.warnings, service.config.frontend.strict_requests
    tokenizer = service.model.tokenizer
    _check_prompt_size(valid.logprobs, prompts, valid.n)
    warnings += (*valid.warnings, *grammar.warnings)
    if is_strict and warnings:
        raise UnsupportedParameter(warnings[0], param=warnings[0].partition(":")[0])
    bad_words: tuple[tuple[int, ...], ...] = ()
    if valid.bad_words:
        bad_words = await tokenizer.off_loop(partial(bad_word_tokens, valid.bad_words, tokenizer))
    if valid.sampling.allowed_token_ids:
        check_drawable(valid.sampling, bad_words)
    fields = asdict(valid.sampling) | {
        "bad_words": bad_words,
        "grammar": grammar.text,
        "grammar_bytes": grammar.num_bytes,
        "max_drafts": valid.max_drafts,
        "pooling": valid.pooling,
    }
    limits = [valid.max_tokens_after(len(prompt), is_strict=is_strict) for prompt in prompts]
    for limit in limits:
        if valid.max_tokens is not None and limit < valid.max_tokens:
            field, asked = valid.max_tokens_field, valid.max_tokens
            warnings.append(f"{field}: {limit} instead of {asked}, because the context has no room for more")
    sampling = [SamplingParams(max_tokens=limit, **fields) for limit in limits]
    return ReadyRequest(valid, prompts, sampling, grammar, await _stop_strings(tokenizer, valid))


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


def submit(
    service: Service,
    record: RequestRecord,
    ready: ReadyRequest,
    *,
    shown: frozenset[int] = frozenset(),
    is_prompt_only: bool = False,
) -> Run:
    """Send a request to the engine, one AddRequest per prompt. The caller must `finish` the run on every path.

    The special tokens in `shown` always stay in the text. If `is_prompt_only`, no output is returned.

    Raises:
        RateLimitExceeded: if the API key's tokens are used up.
        Unavailable: if the engine's queue cannot be reached.
    """
    valid, tokenizer, key_use = ready.valid, service.model.tokenizer, record.key_use
    name, group = service.engine.name, service.generations.num_made
    left = None if record.seconds is None else max(0.001, record.arrived + record.seconds - time.monotonic())
    if valid.targets is not None:
        record.targets = valid.targets.nearer(record.targets or valid.targets)
    targets = record.targets or NO_TARGETS
    waited_ms = (time.monotonic() - record.arrived) * 1e3
    requests = [
        AddRequest(
            request_id=f"{name}:{service.generations.next_number()}:{record.request_id}",
            prompt_token_ids=struct.pack(f"<{len(prompt)}i", *prompt),
            sampling=sampling,
            n=valid.num_sequences,
            priority=valid.priority,
            is_background=record.is_background,
            cache_salt=valid.cache_salt if key_use is None else key_use.salted(valid.cache_salt),
            tenant=record.tenant,
            weight=1.0 if key_use is None else key_use.key.weight,
            group=f"{name}:{group}",
            seconds_left=left or 0.0,
            ttft_left=max(0.001, (targets.ttft_ms - waited_ms) * 1e-3) if targets.ttft_ms < inf else 0.0,
            tpot=targets.tpot_ms * 1e-3 if targets.tpot_ms < inf else 0.0,
            images=ready.images,
        )
        for prompt, sampling in zip(ready.prompts, ready.sampling, strict=True)
    ]
    rules = OutputRules(
        make_detokenizer=lambda: tokenizer.detokenizer(skip_special_tokens=valid.skip_special_tokens, shown=shown),
        stop=ready.stop,
        include_stop=valid.include_stop,
        min_tokens=valid.sampling.min_tokens,
        is_prompt_only=is_prompt_only,
        reported_stop_token_ids=valid.user_stop_token_ids,
    )
    num_prompt_tokens = sum(len(prompt) for prompt in ready.prompts)
    if key_use is not None:
        key_use.use_prompt(num_prompt_tokens)
    record.num_prompt_tokens = num_prompt_tokens
    record.is_stream = valid.stream
    record.asked = valid
    on_tokens = None if key_use is None else key_use.use_outputs
    generation = Generation(service.engine, requests, rules, service.metrics.inter_token_latency.note, on_tokens)
    task = Run(service, record, ready, generation)
    service.generations.add(generation)
    if left is not None and record.seconds is not None:
        generation.deadline = asyncio.get_running_loop().call_later(left, generation.end, exceeded(record.seconds))
    try:
        generation.start()
    except ApiError:
        task.finish()
        raise
    record.engine = generation.bill.engine
    return task


async def _stream(task: Run, chunks: Chunks, opening: bytes, keep_alive: bytes) -> AsyncGenerator[bytes, None]:
    """The parts of a stream: opening, chunks as they come, usage, [DONE]."""
    generation, valid, pending = task.generation, task.ready.valid, opening
    try:
        if not generation.has_news:
            yield pending or keep_alive  # shows the client that its request was accepted
            pending = b""
        while not generation.is_finished:
            events = await generation.next_events()
            usage = task.usage() if valid.continuous_usage else None
            for event in events:
                pending += chunks.event(event, usage)
            if pending or not events:
                yield pending or keep_alive
                pending = b""
        yield await chunks.end(await task.final_usage() if valid.include_usage else None)
    except Exception as error:
        if not isinstance(error, ApiError):
            log.exception("stream failed")
        task.record.error = from_exception(error)
        yield pending + chunks.failure(task.record.error)
    finally:
        task.finish()
