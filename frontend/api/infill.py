"""Filling in the middle: prompts for `suffix` of completions, and POST /infill, as llama.cpp has it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET

from penstock.frontend.api.body import read
from penstock.frontend.api.run import Run, submit
from penstock.frontend.api.service import Service
from penstock.frontend.engine.generation import SequenceEvent, StopReason
from penstock.frontend.errors import ApiError, InvalidParameter, UnsupportedParameter
from penstock.frontend.exchange import sse
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.schema_infill import INFILL, InfillAnswer, InfillExtra, InfillRequest, InfillTimings
from penstock.frontend.text.infill import FORMATS, JOINT, Chunk, Infill
from penstock.frontend.validation.common import MAX_BYTES_PER_TOKEN, Rules, ValidRequest, validate_common
from penstock.frontend.validation.completion import ValidCompletion

_encode = msgspec.json.encode

REPOSITORY, FILE = "myproject\n", "filename\n"
"""The names that llama.cpp gives the repository and the file with the gap, whose real names it is not told."""

SNIPPET = "\n\n--- snippet ---\n\n"
"""Written before each of the other files if the format has no token for files."""

MAX_EXTRAS = 1024
LEAST_OUTPUT = 256
"""Tokens of output that a prompt leaves room for, at most an eighth of the context: editors send whole files."""


def infill_format(service: Service, param: str) -> Infill:
    """The model's format.

    Raises:
        UnsupportedParameter: the model has none.
    """
    if service.model.infill is None:
        known = ", ".join(dict.fromkeys(marks.models for marks in FORMATS))
        raise UnsupportedParameter(
            f"{param}: this model's tokenizer has no tokens for filling in the middle, as those of {known} have",
            param=param,
        )
    return service.model.infill


def with_ends(common: ValidRequest, infill: Infill, *, ignore_eos: bool) -> ValidRequest:
    """The request with stop tokens that end its output where the text in the gap ends."""
    if ignore_eos:
        return common
    ends = tuple(dict.fromkeys((*common.sampling.stop_token_ids, *infill.ends)))
    return replace(common, sampling=msgspec.structs.replace(common.sampling, stop_token_ids=ends))


async def infill_prompt(
    service: Service,
    infill: Infill,
    before: str,
    after: str,
    client: str,
    extras: Sequence[InfillExtra] = (),
    *,
    begins: bool = True,
    max_tokens: int | None = None,
) -> list[int]:
    """A prompt's token ids. Special tokens spelled out in the texts are read as plain text.

    Raises:
        InvalidParameter: a text cannot be tokenized.
    """
    joint = "" if infill.num_joint_tokens is None else JOINT
    names = [f"{extra.filename}\n" if infill.file is not None else SNIPPET for extra in extras]
    texts = [extra.text if extra.text.endswith("\n") else f"{extra.text}\n" for extra in extras]
    parts = [before, *(joint + text for text in (after, REPOSITORY, FILE, *names, *texts))]
    first, *rest = await service.prompts.encode_plain(parts, client, field="prompt")
    after_ids, repository, file, *others = (ids[infill.num_joint_tokens or 0 :] for ids in rest)
    chunks = [Chunk(*pair) for pair in zip(others[: len(extras)], others[len(extras) :], strict=True)]
    return infill.prompt(first, after_ids, chunks, repository, file, begins=begins, max_tokens=max_tokens)


async def filled_prompts(service: Service, valid: ValidCompletion, client: str) -> list[list[int]]:
    """The prompts of completions with a suffix. `truncate_prompt_tokens` cuts what is farthest from the gap."""
    infill, kept = infill_format(service, "suffix"), valid.common.num_kept_prompt_tokens
    if kept is not None and kept < 0:
        kept = max(valid.common.max_model_len - (valid.common.max_tokens or 1), 1)
    return [
        await infill_prompt(
            service, infill, str(prompt), valid.suffix, client, begins=valid.add_special_tokens, max_tokens=kept
        )
        for prompt in valid.prompts
    ]


async def infill(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """The handler.

    Raises:
        ApiError: before the first byte.
    """
    request, num_bytes = await read(INFILL, record, body), len(body)
    service = await service.serving(request.model)
    with await service.admit(record, num_bytes) as admission:
        marks, rules = infill_format(service, "input_suffix"), admission.rules
        before, after, extras = _parts(request)
        common, is_prompt_only = _valid(request, marks, rules)
        admission.hold(common)
        fields = request.response_fields or []
        del body, request  # they may be large
        most_chars = MAX_BYTES_PER_TOKEN * rules.max_model_len
        most = rules.max_model_len - min(common.max_tokens or LEAST_OUTPUT, max(rules.max_model_len // 8, 1))
        near = _near(extras, most_chars)
        prompt = await infill_prompt(
            service, marks, before[-most_chars:], after[:most_chars], record.tenant, near, max_tokens=most
        )
        run = await submit(service, record, common, [prompt], is_prompt_only=is_prompt_only)
    del before, after, extras, near
    with run:
        writer = _Writer(run, fields, is_cut=len(prompt) >= most)
        if not common.stream:
            [answer] = await run.answers()
            wrong = await run.schema_error(answer.text, answer.finish_reason)
            return Reply(writer.answer(answer.text, answer.finish_reason, answer.stop_reason, wrong))
        await run.first_news()
        return run.streamed(writer)


def _parts(request: InfillRequest) -> tuple[str, str, list[InfillExtra]]:
    """The text before the gap, the one after it, and other files."""
    before, after, extras = request.input_prefix, request.input_suffix, request.input_extra or []
    if before is None:
        raise InvalidParameter("input_prefix is required", param="input_prefix")
    if after is None:
        raise InvalidParameter("input_suffix is required", param="input_suffix")
    if len(extras) > MAX_EXTRAS:
        raise InvalidParameter(
            f"input_extra may hold at most {MAX_EXTRAS} texts, got {len(extras)}", param="input_extra"
        )
    return before + (request.prompt or ""), after, extras


def _valid(request: InfillRequest, marks: Infill, rules: Rules) -> tuple[ValidRequest, bool]:
    """The request, checked, and whether its prompt is only to be cached."""
    num_asked = request.max_tokens if request.n_predict is None else request.n_predict
    is_prompt_only = num_asked == 0
    if request.repetition_penalty is None:
        request.repetition_penalty = request.repeat_penalty
    asked = None if num_asked is None or num_asked < 0 else num_asked
    common = validate_common(request, rules, max_tokens=1 if is_prompt_only else asked, max_tokens_field="n_predict")
    if common.num_sequences != 1:
        raise InvalidParameter("n must be 1 for a text that is filled in", param="n")
    return with_ends(common, marks, ignore_eos=bool(request.ignore_eos)), is_prompt_only


def _near(extras: list[InfillExtra], most_chars: int) -> list[InfillExtra]:
    """The last extras, as many as may fit."""
    sizes = accumulate(len(extra.text) for extra in reversed(extras))
    num = sum(1 for size in sizes if size <= most_chars)
    return extras[len(extras) - num :]


class _Writer:
    """Writes answers in llama.cpp's shape: an event for each piece of text, then one with the figures."""

    keep_alive: ClassVar[bytes] = sse.KEEP_ALIVE

    def __init__(self, run: Run, fields: list[str], *, is_cut: bool) -> None:
        self._run = run
        self._fields = fields
        self._is_cut = is_cut
        self._is_checked, self._text = bool(run.grammar.checked_schema), ""
        self._ending: tuple[str, StopReason] = ("", None)

    def event(self, event: SequenceEvent) -> bytes:
        self._text += event.text if self._is_checked else ""
        self._ending = event.finish_reason or "", event.stop_reason
        return sse.event(_encode({"index": 0, "content": event.text, "stop": False})) if event.text else b""

    async def end(self) -> bytes:
        finish_reason, stop_reason = self._ending
        wrong = await self._run.schema_error(self._text, finish_reason)
        return sse.event(self.answer("", finish_reason, stop_reason, wrong))

    def failure(self, error: ApiError) -> bytes:
        return sse.error_event(error)

    def answer(self, content: str, finish_reason: str, stop_reason: StopReason, schema_error: str) -> bytes:
        """The whole answer, or the end of a stream."""
        record, progress = self._run.record, self._run.generation.progress
        is_word = isinstance(stop_reason, str)
        told = InfillAnswer(
            content=content,
            stop=True,
            model=self._run.valid.model,
            tokens_predicted=progress.num_output_tokens,
            tokens_evaluated=record.num_prompt_tokens,
            tokens_cached=record.num_prompt_tokens + progress.num_output_tokens,
            truncated=self._is_cut,
            stop_type="word" if is_word else "eos" if finish_reason == "stop" else "limit",
            stopping_word=str(stop_reason) if is_word else "",
            timings=_timings(self._run),
            schema_error=schema_error or UNSET,
        )
        return _encode(told if not self._fields else _picked(msgspec.to_builtins(told), self._fields))


def _picked(told: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """The fields at these paths, whose names are separated by slashes."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = told
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found


def _timings(run: Run) -> InfillTimings:
    record, progress = run.record, run.generation.progress
    begun, first, at = run.moments()
    num_computed, num_written = record.num_prompt_tokens - progress.num_cached_tokens, progress.num_output_tokens
    prompt_ms, written_ms = (first - begun) * 1e3, (at - first) * 1e3
    return InfillTimings(
        cache_n=progress.num_cached_tokens,
        prompt_n=num_computed,
        prompt_ms=round(prompt_ms, 3),
        prompt_per_token_ms=round(prompt_ms / max(num_computed, 1), 3),
        prompt_per_second=round(num_computed / prompt_ms * 1e3, 3) if prompt_ms else 0.0,
        predicted_n=num_written,
        predicted_ms=round(written_ms, 3),
        predicted_per_token_ms=round(written_ms / max(num_written, 1), 3),
        predicted_per_second=round(num_written / written_ms * 1e3, 3) if written_ms else 0.0,
    )
