"""The HTTP types of /v1/responses. See `schema.py`; the shapes are OpenAI's."""

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from penstock.frontend.schema import Bill, ContentLogprob, SamplingRequest, Unsupported

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that requests log-probabilities."""

# --- requests -------------------------------------------------------------------------------


class ReasoningOptions(Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(Struct, frozen=True):
    """Like `schema.ResponseFormat`, but flat."""

    type: str = "text"
    name: str | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET
    schema: dict[str, Any] | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class TextOptions(Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ConversationId(Struct, frozen=True):
    id: str


class ResponsesRequest(SamplingRequest, kw_only=True):
    """POST /v1/responses"""

    always_has_usage: ClassVar[bool] = True

    input: str | list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    conversation: str | ConversationId | None = None
    prompt: Unsupported = None
    return_tokens_as_token_ids: Unsupported = None
    return_token_ids: Unsupported = None
    return_timings: Unsupported = None


class CompactRequest(Struct, kw_only=True):
    """POST /v1/responses/compact"""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None  # ours: of the summary
    tools: list[dict[str, Any]] | None = None  # the following ones have no effect
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: dict[str, Any] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


RESPONSES = msgspec.json.Decoder(ResponsesRequest)
COMPACT = msgspec.json.Decoder(CompactRequest)

# --- answers --------------------------------------------------------------------------------

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, frozen=True):
    text: str
    type: str = "output_text"
    annotations: tuple[()] = ()
    logprobs: tuple[ContentLogprob, ...] = ()


class ReasoningText(Struct, frozen=True):
    text: str
    type: str = "reasoning_text"


class SummaryText(Struct, frozen=True):
    text: str
    type: str = "summary_text"


class ReasoningItem(Struct, frozen=True):
    id: str
    content: list[ReasoningText]
    status: Status
    type: str = "reasoning"
    summary: tuple[SummaryText, ...] = ()
    encrypted_content: None = None


class MessageItem(Struct, frozen=True):
    id: str
    content: list[OutputText]
    status: Status
    type: str = "message"
    role: str = "assistant"


class FunctionCallItem(Struct, frozen=True):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    type: str = "function_call"


class CustomToolCallItem(Struct, frozen=True):
    id: str
    call_id: str
    name: str
    input: str
    status: Status
    type: str = "custom_tool_call"


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    bill: Bill | UnsetType = UNSET


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class Response(Struct, frozen=True, kw_only=True):
    """A response, finished or in progress."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    model: str
    output: list[Any]  # of OutputItem, which msgspec cannot tell apart when reading
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: str | None
    conversation: ConversationId | UnsetType = UNSET
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    background: bool = False
    schema_error: str | UnsetType = UNSET  # for a finished text whose schema could not be fully enforced
    system_fingerprint: str | None = None  # as in chat completions


class CompactionItem(Struct, frozen=True):
    """What stands for all but the user's messages of a conversation."""

    id: str
    encrypted_content: str  # the summary, for this server only
    type: str = "compaction"


class CompactedResponse(Struct, frozen=True, kw_only=True):
    """A conversation made shorter: the user's messages, and one item for the rest."""

    id: str
    object: str = "response.compaction"
    created_at: int
    output: list[Any]
    usage: ResponseUsage


class DeletedResponse(Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItems(Struct, frozen=True):
    """A page of a stored response's input."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokens(Struct, frozen=True):
    """The size of a request's prompt."""

    input_tokens: int
    object: str = "response.input_tokens"
