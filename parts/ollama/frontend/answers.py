"""Answers in Ollama's shape: lines of JSON as the text grows, the last one with figures; or one object at the end."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.frontend import schema
from penstock.frontend.api.run import Run
from penstock.frontend.engine.generation import SequenceEvent
from penstock.frontend.engine.scores import ShownToken
from penstock.frontend.errors import ApiError
from penstock.frontend.parsing.parser import (
    PLAIN,
    MessageParser,
    OutputFormat,
    ParsedCall,
    ReasoningCounter,
    parse_message,
)
from penstock.frontend.parsing.parts import CallArguments, CallInput, CallStart, Content, Part, Reasoning
from penstock.parts.ollama.frontend.schema import (
    OllamaAnswer,
    OllamaCalledFunction,
    OllamaChatAnswer,
    OllamaFigures,
    OllamaGenerateAnswer,
    OllamaLogprob,
    OllamaMessage,
    OllamaToolCall,
    OllamaTopLogprob,
    error_line,
)

_encode = msgspec.json.encode

HEADERS = {"Content-Type": "application/x-ndjson", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

KEEP_ALIVE = b" "
"""A space before the next line's object, which readers of lines skip."""


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of an answer, or all of it."""

    content: str = ""
    thinking: str = ""
    calls: tuple[OllamaToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where one route puts the parts of an answer."""

    answer: type[OllamaAnswer]
    fields: Callable[[Said], dict[str, Any]]
    has_context: bool = False  # answers include the tokens so far, which the client may send back

    @property
    def before_content(self) -> bytes:
        """The JSON between the time and the text, in a piece that has only content."""
        return _encode(self.fields(Said("\0"))).partition(b'"\\u0000"')[0].replace(b"{", b",", 1)

    @property
    def after_content(self) -> bytes:
        return _encode(self.fields(Said("\0"))).partition(b'"\\u0000"')[2].removesuffix(b"}")


def _chat_fields(said: Said) -> dict[str, Any]:
    thinking, calls = said.thinking or UNSET, list(said.calls) or UNSET
    return {"message": OllamaMessage(said.content, thinking=thinking, tool_calls=calls)}


def _generate_fields(said: Said) -> dict[str, Any]:
    return {"response": said.content} | ({"thinking": said.thinking} if said.thinking else {})


CHAT_DIALECT = Dialect(OllamaChatAnswer, _chat_fields)
GENERATE_DIALECT = Dialect(OllamaGenerateAnswer, _generate_fields, has_context=True)
RAW_DIALECT = Dialect(OllamaGenerateAnswer, _generate_fields)


class Lines:
    """The lines of one stream."""

    keep_alive: ClassVar[bytes] = KEEP_ALIVE

    def __init__(self, run: Run, dialect: Dialect, output_format: OutputFormat) -> None:
        self._dialect, self._run = dialect, run
        self._scores = run.score_writer()
        self._head = _encode({"model": run.valid.model})[:-1] + b',"created_at":"'
        self._before, self._after = b'"' + dialect.before_content, dialect.after_content + b',"done":false}\n'
        self._parser = None if output_format is PLAIN else MessageParser(output_format)
        self._counter = ReasoningCounter(output_format, run.service.model.tokenizer)
        self._calls = _Calls()
        self._is_checked = bool(run.grammar.checked_schema)
        self._text: list[str] = []  # the content so far, if it is checked at the end
        self._token_ids: list[int] = []
        self._finish_reason = ""

    def event(self, event: SequenceEvent) -> bytes:
        """The lines for the output that has become certain."""
        if self._dialect.has_context:
            self._token_ids += event.token_ids
        scores = event.scores if self._scores is not None else None
        if self._parser is None:
            self._finish_reason = event.finish_reason or ""
            return self._line(Said(event.text), scores) if event.text or scores else b""
        self._run.record.num_reasoning_tokens = self._counter.feed(event.token_ids)
        parts = self._parser.feed(event.text)
        if event.finish_reason is not None:
            parts += self._parser.finish()
            self._finish_reason = self._parser.end(event.finish_reason)
            self._run.record.num_calling = int(self._finish_reason == "tool_calls")
        said = self._calls.take(parts)
        if event.finish_reason is not None:
            said += self._calls.finish()
        if scores and not said:
            said = [Said()]  # of text that is held back
        lines = [self._line(piece, scores if at == 0 else None) for at, piece in enumerate(said)]
        return b"".join(lines)

    async def end(self) -> bytes:
        """The last line, with the figures."""
        wrong = await self._run.schema_error("".join(self._text), self._finish_reason)
        return _encode(_finished(self._dialect, self._run, Said(), self._finish_reason, self._token_ids, wrong)) + b"\n"

    def failure(self, error: ApiError) -> bytes:
        """The last line of a stream that fails."""
        return error_line(error) + b"\n"

    def _line(self, said: Said, scores: list[ShownToken] | None) -> bytes:
        if self._is_checked:
            self._text.append(said.content)
        head = self._head + now().encode()
        if not (said.thinking or said.calls or scores):
            return head + self._before + _encode(said.content) + self._after
        rest = {**self._dialect.fields(said), "done": False}
        if scores and self._scores is not None:
            rest["logprobs"] = _logprobs(self._scores.chat(scores))
        return head + b'",' + _encode(rest)[1:] + b"\n"


class _Calls:
    """Joins the pieces of a call, because Ollama's clients get complete calls."""

    def __init__(self) -> None:
        self._open: ParsedCall | None = None
        self._num_told = 0

    def take(self, parts: list[Part]) -> list[Said]:
        """What to send for these parts."""
        said: list[Said] = []
        for part in parts:
            match part:
                case CallArguments() | CallInput():
                    if self._open is not None:
                        self._open.arguments += part.text
                case CallStart():
                    said += self.finish()
                    self._open = ParsedCall(part.call_id, part.name)
                case Content():
                    said += [*self.finish(), Said(part.text)]
                case Reasoning():
                    said += [*self.finish(), Said(thinking=part.text)]
        return said

    def finish(self) -> list[Said]:
        """The open call, if it is complete."""
        call, self._open = self._open, None
        told = () if call is None else whole_calls([call], self._num_told)
        self._num_told += len(told)
        return [Said(calls=told)] if told else []


def whole_calls(calls: list[ParsedCall], num_before: int = 0) -> tuple[OllamaToolCall, ...]:
    """Calls with their arguments as objects. A call cut off by the end of the text is left out: it must not be run."""
    told: list[OllamaToolCall] = []
    for call in calls:
        try:
            arguments = msgspec.json.decode(call.arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            continue
        if isinstance(arguments, dict):
            function = OllamaCalledFunction(num_before + len(told), call.name, arguments)
            told.append(OllamaToolCall(call.call_id, function))
    return tuple(told)


async def whole(run: Run, dialect: Dialect, output_format: OutputFormat) -> bytes:
    """The body of a complete answer."""
    [answer] = await run.answers()
    run.record.num_reasoning_tokens = ReasoningCounter(output_format, run.service.model.tokenizer).feed(
        answer.token_ids
    )
    message = parse_message(output_format, answer.text, answer.finish_reason)
    run.record.num_calling = int(message.finish_reason == "tool_calls")
    wrong = await run.schema_error(message.content, message.finish_reason)
    scores = run.score_writer()
    logprobs = UNSET if scores is None else _logprobs(scores.chat(answer.scores))
    said = Said(message.content, message.reasoning, whole_calls(message.calls))
    return _encode(_finished(dialect, run, said, message.finish_reason, answer.token_ids, wrong, logprobs))


def loaded(dialect: Dialect, model: str, reason: str) -> bytes:
    """The answer to a request that only asks to load or to unload the model, which is the reason."""
    fields = dialect.fields(Said())
    return _encode(dialect.answer(model=model, created_at=now(), done=True, done_reason=reason, **fields))


def now() -> str:
    """The time in Go's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def figures(run: Run) -> OllamaFigures:
    """Durations measured by this process: until the request had a row, until its first token, until now."""
    record, progress = run.record, run.generation.progress
    begun, first, at = run.moments()
    return OllamaFigures(
        total_duration=_nanoseconds(at - record.arrived),
        load_duration=_nanoseconds(begun - record.arrived),
        prompt_eval_count=record.num_prompt_tokens,
        prompt_eval_duration=_nanoseconds(first - begun),
        eval_count=progress.num_output_tokens,
        eval_duration=_nanoseconds(at - first),
    )


def _nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)


def _finished(
    dialect: Dialect,
    run: Run,
    said: Said,
    finish_reason: str,
    token_ids: list[int],
    schema_error: str,
    logprobs: list[OllamaLogprob] | UnsetType = UNSET,
) -> OllamaAnswer:
    fields = dialect.fields(said) | msgspec.structs.asdict(figures(run))
    if dialect.has_context:
        fields["context"] = run.prompts[0] + token_ids
    return dialect.answer(
        model=run.valid.model,
        created_at=now(),
        done=True,
        done_reason="stop" if finish_reason == "tool_calls" else finish_reason,
        schema_error=schema_error or UNSET,
        logprobs=logprobs,
        **fields,
    )


def _logprobs(told: schema.ChatLogprobs) -> list[OllamaLogprob]:
    return [
        OllamaLogprob(
            token.token,
            token.logprob,
            token.bytes,
            [OllamaTopLogprob(other.token, other.logprob, other.bytes) for other in token.top_logprobs] or UNSET,
        )
        for token in told.content
    ]
