"""The HTTP types of the Messages API. See `frontend/schema.py`; the shapes are Anthropic's."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.frontend.schema import DrawFields, Unsupported

Block = dict[str, Any]
"""A content block as a client sends it."""

_BLOCK = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]},
    },
    "required": ["role", "content"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"type": "string"}, "name": {"type": "string"}, "input_schema": {"type": "object"}},
}

Turns = Annotated[list[dict[str, Any]], Meta(extra_json_schema={"items": _MESSAGE})]
ClientTools = Annotated[list[dict[str, Any]], Meta(extra_json_schema={"items": _TOOL})]
"""Plain objects, which `conversation.py` and `validate.py` check."""

# --- requests -------------------------------------------------------------------------------


class ThinkingConfig(Struct):
    """Whether the model thinks before it answers: `enabled`, `adaptive`, `disabled` or `between_tools`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None  # `summarized` or `omitted`


class OutputFormatConfig(Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct):
    effort: str | None = None
    format: OutputFormatConfig | None = None


class MessagesMetadata(Struct):
    user_id: str | None = None


class CountTokensRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens: what a prompt is made of."""

    model: str | None = None
    messages: Turns | None = None
    system: str | list[Block] | None = None
    tools: ClientTools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormatConfig | None = None  # where older clients send it
    cache_control: dict[str, Any] | None = None  # no effect: prompts are always cached
    context_management: dict[str, Any] | None = None
    speed: str | None = None
    mcp_servers: Unsupported = None
    chat_template_kwargs: dict[str, Any] | None = None  # ours, as in the other APIs


class _MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    container: Unsupported = None
    priority: int | None = None  # this field and the next one are ours, as in the other APIs
    cache_salt: str | None = None


if TYPE_CHECKING:

    class MessagesRequest(_MessagesRequest, DrawFields, kw_only=True):
        """POST /v1/messages"""
else:  # structs have one base
    MessagesRequest = msgspec.defstruct(
        "MessagesRequest",
        [(field.name, field.type, None) for field in msgspec.structs.fields(DrawFields)],
        bases=(_MessagesRequest,),
        namespace={"__doc__": "POST /v1/messages", "draws": DrawFields.draws},
        module=__name__,
        kw_only=True,
    )


MESSAGES = msgspec.json.Decoder(MessagesRequest)
COUNT_TOKENS = msgspec.json.Decoder(CountTokensRequest)

# --- answers --------------------------------------------------------------------------------


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageTokensDetails(Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(Struct, frozen=True):
    """`input_tokens` are those of the prompt that were not found in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: MessageTokensDetails | UnsetType = UNSET
    service_tier: str = "standard"


class MessageAnswer(Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    role: str = "assistant"
    stop_details: None = None  # for refusals, which do not occur
    schema_error: str | UnsetType = UNSET  # where the text does not match a schema that could not be enforced


class MessageTokensCount(Struct, frozen=True):
    input_tokens: int


class Supported(Struct, frozen=True):
    supported: bool


class ThinkingTypes(Struct, frozen=True):
    adaptive: Supported
    between_tools: Supported
    disabled: Supported
    enabled: Supported


class ThinkingSupport(Struct, frozen=True):
    supported: bool
    types: ThinkingTypes


class EffortSupport(Struct, frozen=True):
    supported: bool
    low: Supported
    medium: Supported
    high: Supported
    xhigh: Supported
    max: Supported


class ServerToolsSupport(Struct, frozen=True):
    supported: bool
    code_execution: Supported
    web_search: Supported


class ModelCapabilities(Struct, frozen=True):
    """What requests may ask of a model."""

    thinking: ThinkingSupport
    effort: EffortSupport
    structured_outputs: Supported
    batch: Supported
    citations: Supported
    code_execution: Supported
    context_management: Supported
    image_input: Supported
    pdf_input: Supported
    server_tools: ServerToolsSupport


class ModelInfo(Struct, frozen=True, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: str  # RFC 3339
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: ModelCapabilities
    lifecycle: str = "active"


class ModelInfoPage(Struct, frozen=True):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool
