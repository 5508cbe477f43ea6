"""The HTTP types: requests as clients send them, answers as clients read them.

Requests are liberal: unknown fields are ignored (`validation/foreign_fields.py` knows some of them), any
field may be null. Types are strict (an integer is not a string, and `true` is not an integer). Only types
are checked here; `validation/` turns requests into another type, which the rest of the program uses.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.config import samplers

Unsupported = Annotated[
    Any, Meta(description="Not supported: refused if it asks for something.", extra={"is_unsupported": True})
]
"""A field that is known but not supported: refused if it asks for something (see `refuse_unsupported`)."""

_MESSAGE = {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]}
_FUNCTION = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_TOOL = {
    "type": "object",
    "properties": {"type": {"enum": ["function", "custom"]}, "function": _FUNCTION, "custom": _FUNCTION},
    "required": ["type"],
}

Messages = Annotated[list[dict[str, Any]], Meta(extra_json_schema={"items": _MESSAGE})]
Tools = Annotated[list[dict[str, Any]], Meta(extra_json_schema={"items": _TOOL})]
Functions = Annotated[list[dict[str, Any]], Meta(extra_json_schema={"items": _FUNCTION})]
"""Objects that the chat template gets as they were sent; the checks in `validation/` look into them."""

# --- requests -------------------------------------------------------------------------------


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Struct):
    """A schema and its name. If it is strict, what cannot be enforced is refused."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """OpenAI's way to ask for JSON (type `text`, `json_object` or `json_schema`), and extensions by others."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None  # llama.cpp, Together, Fireworks
    pattern: str | None = None  # Together: type `regex`
    grammar: str | None = None  # Fireworks: type `grammar`
    format: dict[str, Any] | None = None  # xgrammar: type `structural_tag`
    structures: list[dict[str, Any]] | None = None  # its older form, as the next one
    triggers: list[str] | None = None


class StructuredOutputs(Struct):
    """vLLM's fields for structured output; one of the kinds."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class SpeculativeOptions(Struct):
    """How many tokens are guessed in a step at most; 0: none."""

    num_speculative_tokens: int | None = None


if TYPE_CHECKING:

    class SamplerFields(Struct):
        """The parameters of samplers (`config/samplers.py`), and their order."""
else:
    SamplerFields = msgspec.defstruct("SamplerFields", samplers.fields(), kw_only=True)


class DrawFields(SamplerFields, kw_only=True):
    """How each token is drawn: the same fields on every route, whatever its dialect calls the others."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | list[list[Any]] | None = None  # or llama.cpp's pairs
    seed: int | None = None

    def draws(self) -> dict[str, Any]:
        """These fields of any request that has them."""
        return {name: getattr(self, name) for name in DrawFields.__struct_fields__}


class SamplingRequest(DrawFields, kw_only=True):
    """The fields that chat completions and completions share."""

    always_has_usage: ClassVar[bool] = False  # even when streamed

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_timings: bool | None = None
    return_bill: bool | None = None
    speculative: bool | SpeculativeOptions | None = None
    priority: int | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    cache_salt: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # a hint: equal prefixes are found without it
    prompt_cache_retention: str | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None  # of older vLLM
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None  # llama.cpp
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None  # SGLang
    ebnf: str | None = None


class ChatRequest(SamplingRequest, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Messages | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: Functions | None = None  # what `tools` were called once, as the next one
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    store: bool | None = None


class CompletionRequest(SamplingRequest, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None  # the text after a gap


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int] | None = None


# --- answers --------------------------------------------------------------------------------


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class Timings(Struct, frozen=True):
    """Milliseconds on the server: until the first token, from the first to the last token, and in total so far."""

    ttft_ms: float | None
    output_ms: float | None
    total_ms: float


class SloReport(Struct, frozen=True):
    """The targets of a request, and whether it has met them so far."""

    ttft_ms: float | None
    tpot_ms: float | None
    met: bool
    demoted: str | UnsetType = UNSET  # why it was served after others, if it was


class Bill(Struct, frozen=True):
    """What the engine spent on a request, over all its sequences."""

    queue_ms: float | None  # until the first sequence had a row
    steps: int
    device_seconds: float  # its share of the steps' times
    kv_byte_seconds: float  # bytes of KV pages, times the seconds for which they were held
    saved_tokens: int  # prompt tokens not computed: prefix cache, or a sibling's prompt
    preemptions: int
    recomputed_tokens: int
    guessed_tokens: int | UnsetType = UNSET  # tokens guessed ahead of the model, if any
    accepted_tokens: int | UnsetType = UNSET  # guessed tokens that were right
    cache_miss: str | UnsetType = UNSET  # why no more of its prompt was found in the cache, if layers keep states
    price: float | UnsetType = UNSET  # of the device seconds, with --price-per-hour


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    slo: SloReport | UnsetType = UNSET
    bill: Bill | UnsetType = UNSET


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(Struct, frozen=True, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class CalledCustomTool(Struct, frozen=True):
    name: str
    input: str


class CustomToolCall(Struct, frozen=True, tag_field="type", tag="custom"):
    """A call of a tool that takes a text."""

    id: str
    custom: CalledCustomTool


class TopLogprob(Struct, frozen=True):
    """A candidate for a token's position."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(Struct, frozen=True):
    """A token of a chat message."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """`choices[].logprobs` of chat completions."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """`choices[].logprobs` of completions; null for the first token of an echoed prompt."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct, frozen=True):
    """A candidate for a prompt token's position; `rank` 1 is the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""By token id, for each prompt token; null for the first."""


class ChatMessage(Struct, frozen=True):
    role: str
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall | CustomToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET  # for a request with `functions`


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None
    schema_error: str | UnsetType = UNSET  # where the text does not match a schema that could not be enforced


class ChatCompletion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: str
    stop_reason: str | int | None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    schema_error: str | UnsetType = UNSET


class Completion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: str = "text_completion"
    system_fingerprint: str | None = None


class RequestStatus(Struct, frozen=True):
    """What one live sequence is doing."""

    id: str  # of the HTTP request: `x-request-id`
    index: int  # of the sequence
    state: str  # running, waiting, or paused because its client does not read
    reason: str | None  # why it waits
    tenant: str
    age_seconds: float | None  # null: it came from a scheduler that is gone
    prompt_tokens: int
    output_tokens: int
    max_output_tokens: int
    computed_tokens: int
    cached_tokens: int
    pages: int
    row: int | None
    preemptions: int
    engine: str | UnsetType = UNSET  # if there are several


class RequestStatusList(Struct, frozen=True):
    """Those that run, those that wait by their turns, those that are paused; and how many there are in all."""

    data: list[RequestStatus]
    has_more: bool
    num_running: int
    num_waiting: int
    num_paused: int
    object: str = "list"


class EngineStatus(Struct, frozen=True):
    """One engine behind the server. Counts are of all frontends' sequences, and of paused requests."""

    id: str
    state: Literal["ready", "draining", "drained", "not ready"]
    reason: str | None  # why it is not ready
    start_id: str | None  # of its scheduler's process: different after each start
    num_ranks: int | None
    running: int
    waiting: int
    paused: int
    role: Literal["", "both", "prefill", "decode"] = ""  # empty: it was started without one, and cannot get one


ROLES: tuple[Literal["both", "prefill", "decode"], ...] = ("both", "prefill", "decode")
"""What an engine can be made."""


class RoleRequest(Struct, frozen=True, kw_only=True):
    """What an engine is to do from now on."""

    # Not a Literal: msgspec would quote all of a wrong value, which takes 70 ms for one of eight megabytes.
    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]


class EngineList(Struct, frozen=True):
    """All engines behind the server."""

    data: list[EngineStatus]
    object: str = "list"


class ExpertLoad(Struct, frozen=True):
    """How many tokens went to each expert of each layer, over all engines."""

    layers: dict[str, list[int]]
    object: str = "expert_load"


class ModelCard(Struct, frozen=True):
    id: str
    created: int
    root: str
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "penstock"
    parent: str | None = None  # the model whose adapter this is
    kernels: str | None = None  # what computes the model; None until an engine is ready
    system_fingerprint: str | None = None  # as in answers; None until an engine is ready
    input_modalities: tuple[str, ...] = ("text",)  # what messages may hold
    vision: str | None = None  # whose code computes images: "own" or "transformers"; None: none does
    text_only: str | None = None  # why a model that sees is served as text only
    sampling_defaults: dict[str, float] | None = None  # for fields that a request leaves out
    warning: str | None = None  # why it is much slower than it could be


class SystemParts(Struct, frozen=True):
    """What an answer's bytes depend on besides the request.

    `system_fingerprint` is a digest of all but `batch_invariant`.
    """

    program: str  # Penstock's version
    architecture: str  # digest of config.json
    weights: str  # checksum over all bytes of the weights
    text: str  # digest of tokenizer, chat template and sampling defaults
    kernels: str  # what computes the model
    arithmetic: str  # the software and processor behind these kernels, as far as they affect rounding
    dtype: str  # of weights and KV
    ranks: int  # workers that hold the model together
    batch_invariant: bool  # whether the same request gives the same bytes whatever else runs
    adapter: str | UnsetType = UNSET  # of the weights, with a digest of its files


class Health(msgspec.Struct, frozen=True):
    status: str
    engines: dict[str, str] | msgspec.UnsetType = msgspec.UNSET  # their states, if there are several


class Version(Struct, frozen=True):
    version: str
    system_fingerprint: str | None = None  # None until an engine is ready, as is the next
    system: SystemParts | None = None


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


class TokenizeAnswer(Struct, frozen=True):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Struct, frozen=True):
    prompt: str


CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)
TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)
ROLE = msgspec.json.Decoder(RoleRequest)
