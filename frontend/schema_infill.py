"""llama.cpp's `/infill`, as editors ask for it."""

import msgspec
from msgspec import UNSET, Struct, UnsetType

from penstock.frontend.schema import SamplingRequest, Unsupported


class InfillExtra(Struct):
    """Another file, or a piece of one."""

    text: str = ""
    filename: str = "tmp"


class InfillRequest(SamplingRequest, kw_only=True):
    """POST /infill"""

    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[InfillExtra] | None = None
    prompt: str | None = None  # continues the prefix
    n_predict: int | None = None  # 0: no output, but the prompt's pages are cached
    repeat_penalty: float | None = None
    response_fields: list[str] | None = None
    cache_prompt: bool | None = None  # no effect: all prompts are cached
    best_of: Unsupported = None
    prompt_logprobs: Unsupported = None
    return_tokens_as_token_ids: Unsupported = None
    return_token_ids: Unsupported = None
    return_timings: Unsupported = None
    return_bill: Unsupported = None
    truncate_prompt_tokens: Unsupported = None  # text that does not fit is left out in any case
    truncation_side: Unsupported = None


class InfillTimings(Struct, frozen=True):
    """Tokens and milliseconds."""

    cache_n: int
    prompt_n: int  # computed, not cached
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillAnswer(Struct, frozen=True):
    """The text in the gap."""

    content: str
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int  # of the prompt
    tokens_cached: int
    truncated: bool  # part of the prompt was left out
    stop_type: str  # eos, word, limit
    stopping_word: str
    timings: InfillTimings
    index: int = 0
    schema_error: str | UnsetType = UNSET  # why the text does not match a schema that could not be enforced


INFILL = msgspec.json.Decoder(InfillRequest)
