"""From a request as sent (`schema.py`) to a valid one: another type, which only this module creates.

Every limit is checked here, before anything is tokenized, queued or allocated. Messages name the field, the limit and
the value.
"""

import gc
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from penstock.frontend.draws_and_clock import DRAWS
from penstock.frontend.errors import ContextLengthExceeded, InvalidParameter, ModelNotFound, UnsupportedParameter
from penstock.frontend.image_source import ImageLimits
from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.prompt import Prompt
from penstock.frontend.schema import CompletionRequest, SamplingRequest, SpeculativeOptions, StreamOptions, Unsupported
from penstock.frontend.targets import MAX_MS, Targets
from penstock.frontend.validation.beams import Beams, asks_for_beams, check_beams, refuse_penalties
from penstock.frontend.validation.grammar import GRAMMAR_FIELDS, GrammarSource, check_grammar
from penstock.frontend.validation.samplers import ValidSamplers, check_samplers
from penstock.frontend.validation.tokens import (
    check_allowed_token_ids,
    check_bad_words,
    check_drawable,
    check_texts,
    check_token_ids,
    shown,
)
from penstock.ipc.messages import SamplingParams

MAX_STOP_STRINGS = 1024
MAX_STOP_CHARACTERS = 16_384
"""Limit for all stop strings together: to prepare them takes about ten milliseconds, and three megabytes."""

LEAST_PENALTY = 1e-6
"""Logits are divided by the repetition penalty, and must stay finite."""

MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
"""As many as the GPU's rows have places for; more would need another kernel."""

MAX_CACHE_SALT = 512
MAX_LOGPROBS = 20
"""The largest number that the GPU's kernel is compiled for when the server starts."""

MAX_DRAFTS = 64
MAX_BYTES_PER_TOKEN = 16
"""A prompt with more bytes than this times the context length is refused before it is tokenized."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""

_MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for absent sampling fields, from the checkpoint's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What requests are checked against: this server's limits and the model's facts."""

    model_names: tuple[str, ...]
    max_n: int
    max_model_len: int  # prompt + output tokens of one sequence
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    tool_format: ToolFormat | None = None  # None: tools are switched off
    hides_calls: bool = False  # whether the chat template shows tools, but no past calls
    images: ImageLimits | None = None  # None: the model takes no images
    why_no_images: str = ""  # a clause, for models that see, but are served as text only
    has_drafts: bool = True  # whether engines guess tokens, as far as they have reported
    logits_processors: tuple[str, ...] = ()  # names of those that requests may ask for


@dataclass(frozen=True, slots=True)
class ValidLogprobs:
    """How many best tokens are returned: -1 for no log-probabilities, 0 for the token itself only."""

    output: int = -1
    prompt: int = -1  # in vLLM's `prompt_logprobs`
    echo: int = -1  # with an echoed prompt
    as_token_ids: bool = False

    @property
    def asks(self) -> bool:
        """Whether any log-probabilities are requested."""
        return max(self.output, self.prompt) >= 0


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A checked request: the fields that all kinds of requests share.

    `submit` (`frontend/api/run.py`) completes its `sampling` once its prompts are tokenized.
    """

    model: str  # as the client wrote it
    n: int
    num_sequences: int  # per prompt; more than n if only the best n of them are returned
    sampling: SamplingParams  # without what depends on prompts, tokenizer or grammar
    max_tokens: int | None  # None: the rest of the context
    max_model_len: int
    stop: tuple[str, ...]
    include_stop: bool
    user_stop_token_ids: frozenset[int]  # reported as stop_reason; EOS ids are not
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_timings: bool
    return_bill: bool
    priority: int
    targets: Targets | None
    cache_salt: str
    user: str  # empty: the request names none
    max_tokens_field: str
    logprobs: ValidLogprobs
    bad_words: tuple[str, ...]
    num_kept_prompt_tokens: int | None  # from the end; -1: as many as leave room for the output; None: all
    keeps_prompt_start: bool = False  # a truncated prompt keeps its start instead
    prompt_field: str = "prompt"
    grammar: GrammarSource | None = None  # what the output must match, as the client wrote it
    warnings: tuple[str, ...] = ()  # for the client; see `exchange.py`
    samplers: ValidSamplers | None = None  # None: the kernels do all that is asked for
    beams: Beams | None = None  # None: tokens are drawn

    @property
    def num_at_once(self) -> int:
        """How many sequences the engine has of a prompt at the same time: those of a search are its beams."""
        return self.num_sequences if self.beams is None else self.beams.width

    def truncated_chat(self, prompt: Prompt) -> Prompt:
        """Return the part of a chat's prompt that is kept.

        Raises:
            InvalidParameter: an image would be cut.
        """
        kept = self.truncated(prompt.token_ids)
        if len(kept) == len(prompt.token_ids):
            return prompt
        if prompt.images:
            raise InvalidParameter("truncate_prompt_tokens: a prompt with images cannot be truncated", param="messages")
        return Prompt(kept)

    def truncated(self, prompt: list[int], added: tuple[int, int] = (0, 0)) -> list[int]:
        """Return the part of a prompt that is kept.

        `added`: how many tokens before and behind the text are the tokenizer's own; they are kept whatever is cut.
        """
        kept = self.num_kept_prompt_tokens
        if kept is None:
            return prompt
        if kept < 0 and self.sampling.pooling is not None:
            kept = self.max_model_len
        if kept < 0:
            asked = self.max_tokens or 1
            kept = self.max_model_len - (asked if asked < self.max_model_len else 1)
        before, behind = added
        if len(prompt) > kept > before + behind > 0:
            text, end = prompt[before : len(prompt) - behind], prompt[len(prompt) - behind :]
            kept -= before + behind
            return [*prompt[:before], *(text[:kept] if self.keeps_prompt_start else text[-kept:]), *end]
        return prompt[:kept] if self.keeps_prompt_start else prompt[-kept:]

    def max_tokens_after(self, num_prompt_tokens: int, *, is_strict: bool = False) -> int:
        """Return how many tokens may follow a prompt of this length, limited by the context.

        Raises:
            ContextLengthExceeded: if the prompt does not fit into the context, or `is_strict` and the output does not.
        """
        limit = self.max_model_len
        if self.sampling.pooling is not None:
            if num_prompt_tokens > limit:
                raise ContextLengthExceeded(
                    f"the context length is {limit} tokens, {self.prompt_field} has {num_prompt_tokens}",
                    param=self.prompt_field,
                )
            return 1
        if num_prompt_tokens >= limit:
            raise ContextLengthExceeded(
                f"the context length is {limit} tokens, the prompt has {num_prompt_tokens} "
                "and must leave room for at least one more",
                param=self.prompt_field,
            )
        room = limit - num_prompt_tokens
        if is_strict and self.max_tokens is not None and self.max_tokens > room:
            raise ContextLengthExceeded(
                f"the context length is {limit} tokens, but {num_prompt_tokens + self.max_tokens} were requested: "
                f"{num_prompt_tokens} in the prompt and {self.max_tokens} in {self.max_tokens_field}",
                param=self.max_tokens_field,
            )
        if self.sampling.min_tokens > room:
            raise ContextLengthExceeded(
                f"min_tokens is {self.sampling.min_tokens}, but the prompt leaves room for {room} tokens",
                param="min_tokens",
            )
        return min(self.max_tokens or room, room)


def validate_common(
    request: SamplingRequest,
    rules: Rules,
    *,
    max_tokens: int | None,
    max_tokens_field: str = "max_tokens",
    prompt_field: str = "prompt",
    num_best: int = -1,
    num_best_of_echo: int = -1,
) -> ValidRequest:
    """Check the fields of `SamplingRequest`.

    `num_best` is the number of best tokens to return for each output token, or -1 for no log-probabilities.

    Raises:
        InvalidRequest: one of its kinds (see `errors.py`).
    """
    model = check_model(request.model, rules)
    refuse_unsupported(request)
    n = integer("n", request.n, 1, 1, rules.max_n)
    defaults = rules.defaults
    stop_token_ids = request.stop_token_ids or []
    if stop_token_ids:
        check_token_ids("stop_token_ids", stop_token_ids, rules.vocab_size, MAX_STOP_TOKEN_IDS)
    eos = () if request.ignore_eos else rules.eos_token_ids
    stops = tuple(dict.fromkeys((*eos, *stop_token_ids)))
    best_of = n if request.best_of in (None, n) else _best_of(request, n, rules.max_n)
    beams = check_beams(request, n, rules.max_n, len(stops), min(MAX_LOGPROBS, rules.vocab_size))
    num_sequences = best_of if beams is None else n
    num_best_of_prompt = check_num_best("prompt_logprobs", request.prompt_logprobs, rules)
    if num_best_of_prompt >= 0 and request.stream:
        raise InvalidParameter("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
    if max_tokens == -1:  # some clients send it to mean as many as there is room for
        max_tokens = None
    if max_tokens is not None:
        max_tokens = integer(max_tokens_field, max_tokens, 1, 1, _MAX_INT)
    min_tokens = integer("min_tokens", request.min_tokens, 0, 0, _MAX_INT)
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidParameter(
            f"min_tokens ({min_tokens}) exceeds {max_tokens_field} ({max_tokens})", param="min_tokens"
        )
    temperature = number("temperature", request.temperature, defaults.temperature, 0.0, 100.0)
    top_p = number("top_p", request.top_p, defaults.top_p, 0.0, 1.0)
    is_best_only = top_p == 0.0
    if is_best_only:  # only the most likely token is left
        temperature, top_p = 0.0, 1.0
    top_k = integer("top_k", request.top_k, defaults.top_k, -1, _MAX_INT)
    allowed = request.allowed_token_ids
    sampling = SamplingParams(
        max_tokens=max_tokens or rules.max_model_len,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=0 if top_k < 1 or top_k >= rules.vocab_size else top_k,
        top_p=top_p,
        min_p=number("min_p", request.min_p, defaults.min_p, 0.0, 1.0),
        repetition_penalty=number(
            "repetition_penalty", request.repetition_penalty, defaults.repetition_penalty, LEAST_PENALTY, 100.0
        ),
        presence_penalty=number("presence_penalty", request.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=number("frequency_penalty", request.frequency_penalty, 0.0, -2.0, 2.0),
        seed=_seed(request.seed),
        min_tokens=min_tokens,
        stop_token_ids=stops,
        logit_bias=_logit_bias(request.logit_bias, rules.vocab_size),
        num_logprobs=num_best if num_sequences == n else max(num_best, 0),
        prompt_logprobs=max(num_best_of_prompt, num_best_of_echo),
        allowed_token_ids=() if allowed is None else check_allowed_token_ids(allowed, rules.vocab_size),
        max_drafts=-1 if request.speculative is None else _max_drafts(request.speculative),
    )
    if allowed is not None:
        check_drawable(sampling)
    if beams is not None and num_best_of_echo >= 0:
        raise UnsupportedParameter("echo with logprobs is not supported with use_beam_search", param="echo")
    options = _stream_options(request)
    samplers = check_samplers(request, sampling, rules.logits_processors, is_best_only=is_best_only)
    if beams is not None and samplers is not None:
        refuse_penalties(samplers.uses)
    return ValidRequest(
        model=model,
        n=n,
        num_sequences=num_sequences,
        sampling=sampling,
        max_tokens=max_tokens,
        max_model_len=rules.max_model_len,
        stop=_stop(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        user_stop_token_ids=frozenset(stop_token_ids) - frozenset(eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        return_timings=_in_usage("return_timings", request.return_timings, request, options),
        return_bill=_in_usage("return_bill", request.return_bill, request, options),
        priority=integer("priority", request.priority, 0, -_MAX_INT, _MAX_INT),
        targets=None if request.slo_ttft_ms is None and request.slo_tpot_ms is None else _targets(request),
        cache_salt=_cache_salt(request.cache_salt),
        user=request.user or request.safety_identifier or "",
        max_tokens_field=max_tokens_field,
        logprobs=ValidLogprobs(
            num_best, num_best_of_prompt, num_best_of_echo, bool(request.return_tokens_as_token_ids)
        ),
        bad_words=check_bad_words(request.bad_words) if request.bad_words else (),
        num_kept_prompt_tokens=_truncation(request.truncate_prompt_tokens, rules.max_model_len),
        keeps_prompt_start=_keeps_start(request),
        prompt_field=prompt_field,
        warnings=_without_effect(request, rules) + (() if samplers is None else samplers.warnings),
        samplers=samplers,
        beams=beams,
        grammar=check_grammar(request, rules.eos_token_ids)
        if any(getattr(request, name) is not None for name in GRAMMAR_FIELDS)
        else None,
    )


def _keeps_start(request: SamplingRequest) -> bool:
    if request.truncation_side not in (None, "left", "right"):
        raise InvalidParameter(
            f"truncation_side must be 'left' or 'right', got {request.truncation_side[:64]!r}", param="truncation_side"
        )
    return request.truncation_side == "right"


def _without_effect(request: SamplingRequest, rules: Rules) -> tuple[str, ...]:
    """Return warnings about accepted fields that cannot change the answer."""
    warnings: tuple[str, ...] = ()
    if request.service_tier not in (None, "auto", "default"):
        warnings = ("service_tier: no effect, there is only one tier",)
    if not asks_for_beams(request) and request.length_penalty not in (None, 1):
        warnings += ("length_penalty: no effect without use_beam_search",)
    if request.speculative and not rules.has_drafts and _max_drafts(request.speculative):
        warnings += ("speculative: no effect, this server was started without --speculative-config",)
    return warnings


def _max_drafts(asked: bool | SpeculativeOptions) -> int:
    """How many tokens may be guessed in a step; -1: as many as pay."""
    if isinstance(asked, bool):
        return -1 if asked else 0
    return integer("speculative.num_speculative_tokens", asked.num_speculative_tokens, -1, 0, MAX_DRAFTS)


def check_model(model: str | None, rules: Rules) -> str:
    """Return the name to answer under; a request may omit the model.

    Raises:
        ModelNotFound: if it names a model that is not served.
    """
    if model is None:
        return rules.model_names[0]
    if model not in rules.model_names:
        raise ModelNotFound(
            f"the model {model[:256]!r} does not exist; served: {rules.model_names[0]!r}", param="model"
        )
    return model


def check_text_size(field: str, text: str, rules: Rules) -> None:
    """Refuse a text that cannot fit into the context, before it is tokenized."""
    limit = MAX_BYTES_PER_TOKEN * rules.max_model_len
    if len(text) > limit or (len(text) * 4 > limit and len(text.encode(errors="replace")) > limit):
        raise ContextLengthExceeded(
            f"{field} has {len(text)} characters; {rules.max_model_len} tokens of context hold at most {limit} bytes",
            param=field,
        )


@cache
def _unsupported_fields(request_type: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(request_type) if field.type == Unsupported)


def refuse_unsupported(request: msgspec.Struct) -> None:
    """Refuse a route's own fields that are known but unsupported: ignoring them would mislead the client."""
    for field in _unsupported_fields(type(request)):
        if getattr(request, field) not in (None, False, "", [], {}):
            raise UnsupportedParameter(f"{field} is not supported", param=field)


def _best_of(request: SamplingRequest, n: int, max_n: int) -> int:
    """Return how many sequences are generated for `n` answers; more than `n` only for whole completions."""
    best_of = request.best_of
    assert best_of is not None
    if not isinstance(request, CompletionRequest):
        raise UnsupportedParameter(f"best_of must equal n, got best_of={best_of} and n={n}", param="best_of")
    if not n <= best_of <= max_n:
        raise InvalidParameter(f"best_of must be between n ({n}) and {max_n}, got {shown(best_of)}", param="best_of")
    if request.stream:
        raise InvalidParameter(
            "best_of larger than n is not available when stream is true: the best is known at the end", param="best_of"
        )
    return best_of


def check_num_best(field: str, value: int | None, rules: Rules) -> int:
    """Return how many best tokens are requested; -1 if the field is absent."""
    return integer(field, value, -1, 0, min(MAX_LOGPROBS, rules.vocab_size))


def _truncation(value: int | None, max_model_len: int) -> int | None:
    """Return how many of a prompt's last tokens are kept: -1 for as many as fit, None for all."""
    if value is not None and value != -1 and not 1 <= value <= max_model_len:
        raise InvalidParameter(
            f"truncate_prompt_tokens must be -1 or between 1 and {max_model_len}, got {shown(value)}",
            param="truncate_prompt_tokens",
        )
    return value


def integer(field: str, value: int | None, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidParameter(f"{field} must be between {low} and {high}, got {shown(value)}", param=field)
    return value


def number(
    field: str, value: float | None, default: float, low: float, high: float, *, is_above: bool = False
) -> float:
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high or (is_above and value == low):
        bounds = f"above {low:g} and at most {high:g}" if is_above else f"between {low:g} and {high:g}"
        raise InvalidParameter(f"{field} must be {bounds}, got {value:g}", param=field)
    return value + 0.0  # -0.0 becomes 0.0


def _seed(seed: int | None) -> int:
    if seed is None or seed == -1:  # other engines' clients send -1 for none
        return DRAWS.get().getrandbits(63)
    if not -(2**63) <= seed < 2**64:
        raise InvalidParameter("seed must fit into 64 bits", param="seed")
    return seed % 2**63


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidParameter(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(stops)}", param="stop")
    if stops:
        check_texts("stop", stops, MAX_STOP_CHARACTERS)
        num_characters = sum(map(len, stops))
        if num_characters > MAX_STOP_CHARACTERS:
            raise InvalidParameter(
                f"stop may hold at most {MAX_STOP_CHARACTERS} characters together, got {num_characters}", param="stop"
            )
    return tuple(dict.fromkeys(stops))


def _logit_bias(biases: dict[str, float] | list[list[Any]] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not biases:
        return ()
    if isinstance(biases, list):
        biases = _by_token(biases)
    if len(biases) > MAX_LOGIT_BIAS:
        raise InvalidParameter(
            f"logit_bias may hold at most {MAX_LOGIT_BIAS} entries, got {len(biases)}", param="logit_bias"
        )
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) >= vocab_size:
            raise InvalidParameter(
                f"logit_bias: keys must be token ids between 0 and {vocab_size - 1}, got {key[:32]!r}",
                param="logit_bias",
            )
        checked[int(key)] = number(f"logit_bias[{key}]", bias, 0.0, -100.0, 100.0)
    return tuple(checked.items())


def _by_token(pairs: list[list[Any]]) -> dict[str, float]:
    """llama.cpp's form: pairs of a token id and a bias, or false for a token that must not come."""
    found: dict[str, float] = {}
    for i, pair in enumerate(pairs):
        token, given = pair if len(pair) == 2 else (None, None)
        bias: Any = -100.0 if given is False else given
        if type(token) is not int or type(bias) not in (int, float):
            raise InvalidParameter(
                f"logit_bias[{i}]: expected a token id with a number or false", param=f"logit_bias[{i}]"
            )
        found[str(token)] = bias
    return found


def _stream_options(request: SamplingRequest) -> StreamOptions:
    if request.stream_options is None:
        return StreamOptions()
    if not request.stream:
        raise InvalidParameter("stream_options is only allowed when stream is true", param="stream_options")
    return request.stream_options


def _in_usage(field: str, asked: bool | None, request: SamplingRequest, options: StreamOptions) -> bool:
    if asked and request.stream and not (options.include_usage or request.always_has_usage):
        raise InvalidParameter(
            f"{field}: this is a part of usage, which a stream has only with stream_options.include_usage", param=field
        )
    return bool(asked)


def _targets(request: SamplingRequest) -> Targets:
    return Targets(
        number("slo_ttft_ms", request.slo_ttft_ms, math.inf, 0.0, MAX_MS),
        number("slo_tpot_ms", request.slo_tpot_ms, math.inf, 0.0, MAX_MS, is_above=True),
    )


def _cache_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not re.fullmatch(rf"[\x20-\x7e]{{1,{MAX_CACHE_SALT}}}", salt):
        raise InvalidParameter(
            f"cache_salt must be 1 to {MAX_CACHE_SALT} printable ASCII characters, got {len(salt)} characters",
            param="cache_salt",
        )
    return salt


@contextmanager
def without_collecting() -> Iterator[None]:
    """Pause the garbage collector while JSON is read: it would scan many new objects, none of which is garbage yet."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()
