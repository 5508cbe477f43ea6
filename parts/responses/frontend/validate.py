"""Checks of /v1/responses, which are chat requests in another shape. See `common.py`."""

from dataclasses import dataclass, replace
from typing import Any

from penstock.frontend.errors import InvalidParameter, InvalidRequest, UnsupportedParameter
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.validation.chat import ValidChat, validate_conversation, with_fields
from penstock.frontend.validation.common import Rules, ValidRequest, check_num_best, validate_common
from penstock.frontend.validation.grammar import GrammarSource, check_ending, schema_source
from penstock.frontend.validation.tools import ToolChoice, validate_tools
from penstock.parts.responses.frontend.items import as_messages, known_items
from penstock.parts.responses.frontend.schema import (
    LOGPROBS,
    ReasoningOptions,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from penstock.parts.responses.frontend.tool_items import Item

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_IDENTIFIER = 512
_INCLUDABLE = frozenset(
    (
        LOGPROBS,
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    )
)
"""Accepted values of `include`, most of which have no effect. Reasoning is always in plain text in `content`, and may
be sent back like that, so nothing is encrypted. There are no server-side tools whose results could be included."""

_TOOL_FIELDS: dict[str, dict[str, Any]] = {
    "function": {"description": None, "parameters": None, "strict": False},
    "custom": {"description": None, "format": {"type": "text"}},
}
"""Types of tools that the model is offered, and the fields that a response shows of them, with their defaults."""


@dataclass(frozen=True, slots=True)
class ValidResponse:
    """A responses request, checked; not rendered yet."""

    chat: ValidChat
    items: list[Item]  # of the whole conversation so far without instructions, as they are stored
    num_before: int  # items of earlier responses
    instructions: str | None
    previous_response_id: str | None
    store: bool
    metadata: dict[str, str]
    user: str | None
    tools: list[dict[str, Any]]  # as they are shown in the response
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    reasoning: ReasoningOptions
    text: TextOptions
    max_output_tokens: int | None
    max_tool_calls: int | None
    top_logprobs: int
    truncates: bool  # drop from the conversation's beginning what does not fit
    safety_identifier: str | None
    prompt_cache_key: str | None
    background: bool
    conversation: str | None  # its id

    @property
    def summarizes(self) -> bool:
        """Whether reasoning is also told as a summary."""
        return (self.reasoning.summary or self.reasoning.generate_summary) is not None


def validate_response(
    request: ResponsesRequest, rules: Rules, template: ChatTemplate | None, previous: list[Item], given: list[Item]
) -> ValidResponse:
    """Check a responses request that continues `previous` items with the `given` ones (see `input_items`).

    Raises:
        InvalidRequest: one of its kinds (see `errors.py`).
    """
    field, max_tokens = "max_output_tokens", request.max_output_tokens
    if max_tokens is None:
        field, max_tokens = "max_tokens", request.max_tokens
    num_best = max(check_num_best("top_logprobs", request.top_logprobs, rules), 0)
    is_told = num_best > 0 or LOGPROBS in (request.include or ())
    common = validate_common(
        request,
        rules,
        max_tokens=max_tokens,
        max_tokens_field=field,
        prompt_field="input",
        num_best=num_best if is_told else -1,
    )
    if common.n != 1:
        raise InvalidParameter(f"n must be 1 for a response, got {common.n}", param="n")
    if common.continuous_usage:
        raise UnsupportedParameter("stream_options.continuous_usage_stats is not supported", param="stream_options")
    warnings = list(common.warnings)
    _check_options(request, warnings)
    shown_tools = _shown_tools(request.tools or [], warnings)
    tool_choice = _tool_choice(request.tool_choice, warnings)
    tools = validate_tools(
        [_chat_tool(tool) for tool in shown_tools],
        tool_choice,
        request.parallel_tool_calls,
        template,
        rules,
    )
    items = previous + given
    try:
        conversation = validate_conversation(
            as_messages(items, request.instructions, takes_images=rules.images is not None, warnings=warnings),
            rules,
            template,
            add_generation_prompt=True,
            continue_final_message=False,
            variables=with_fields(
                request.chat_template_kwargs,
                reasoning_effort=request.reasoning.effort if request.reasoning else None,
                verbosity=request.text.verbosity if request.text else None,
            ),
            tools=None if tools is None else tools.definitions,
        )
    except InvalidRequest as error:
        if error.param is not None and error.param.startswith("messages"):
            error.param = "input"
        raise
    if conversation.images:
        images = tuple(replace(image, field="input") for image in conversation.images)
        conversation = replace(conversation, images=images)
    told = tuple(f"input{note[8:]}" if note.startswith("messages:") else note for note in conversation.warnings)
    conversation = replace(conversation, warnings=told)
    # Every response includes its usage.
    common = replace(common, include_usage=True, grammar=_grammar(request, common, rules), warnings=tuple(warnings))
    return ValidResponse(
        chat=ValidChat(common, conversation, tools, request.include_reasoning is not False),
        items=previous + known_items(given),
        num_before=len(previous),
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        store=request.store is not False,
        metadata=valid_metadata(request.metadata),
        user=request.user,
        tools=shown_tools,
        tool_choice="auto" if tool_choice is None else tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=request.reasoning or ReasoningOptions(),
        text=TextOptions((request.text.format if request.text is not None else None) or TextFormat(), "medium"),
        max_output_tokens=max_tokens,
        max_tool_calls=request.max_tool_calls,
        top_logprobs=max(common.logprobs.output, 0),
        truncates=request.truncation == "auto",
        safety_identifier=_identifier("safety_identifier", request.safety_identifier),
        prompt_cache_key=_identifier("prompt_cache_key", request.prompt_cache_key),
        background=request.background is True,
        conversation=conversation_id(request),
    )


def _grammar(request: ResponsesRequest, common: ValidRequest, rules: Rules) -> GrammarSource | None:
    """What the text must match: given by `text.format`, or as in the other endpoints."""
    text_format = request.text.format if request.text is not None else None
    if text_format is None or text_format.type == "text":
        return common.grammar
    if common.grammar is not None:
        raise InvalidParameter(f"text.format and {common.grammar.field} exclude each other", param="text.format")
    if text_format.type not in ("json_object", "json_schema"):
        raise InvalidParameter(
            f"text.format.type must be 'text', 'json_object' or 'json_schema', got {text_format.type[:64]!r}",
            param="text.format.type",
        )
    check_ending(request, "text.format", rules.eos_token_ids)
    if text_format.type == "json_object":
        return schema_source("text.format", None)
    if not text_format.schema:
        raise InvalidParameter("text.format.schema is required for type 'json_schema'", param="text.format.schema")
    return schema_source("text.format.schema", text_format.schema, is_strict=text_format.strict is True)


def conversation_id(request: ResponsesRequest) -> str | None:
    """The conversation that a request continues and adds to."""
    given = request.conversation
    return given if given is None or isinstance(given, str) else given.id


def input_items(given: str | list[Item] | None) -> list[Item]:
    """A request's input as items.

    Raises:
        InvalidParameter: if there is none.
    """
    if given is None:
        raise InvalidParameter("input is required", param="input")
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def _check_options(request: ResponsesRequest, warnings: list[str]) -> None:
    """Refuse options that should change the answer but are not supported; warn about those without effect."""
    if request.prompt_logprobs is not None:
        raise UnsupportedParameter("prompt_logprobs is not supported for responses", param="prompt_logprobs")
    if request.truncation not in (None, "disabled", "auto"):
        raise InvalidParameter("truncation must be 'auto' or 'disabled'", param="truncation")
    if request.max_tool_calls is not None and request.max_tool_calls < 1:
        raise InvalidParameter("max_tool_calls must be at least 1", param="max_tool_calls")
    reasoning = request.reasoning or ReasoningOptions()
    for summary in (reasoning.summary, reasoning.generate_summary):
        if summary not in (None, "auto", "concise", "detailed"):
            raise InvalidParameter(
                "reasoning.summary must be 'auto', 'concise' or 'detailed'", param="reasoning.summary"
            )
        if summary == "concise":
            warnings.append("reasoning.summary: it is the reasoning as the model wrote it, not shortened")
    for name in request.include or []:
        if name not in _INCLUDABLE:
            raise UnsupportedParameter(f"include: {name[:64]!r} is not supported", param="include")


def _shown_tools(tools: list[dict[str, Any]], warnings: list[str]) -> list[dict[str, Any]]:
    """The functions and custom tools, with the fields that a response always shows.

    Tools of other types would be run by the server (a search), or are known to OpenAI's models only. Agents offer them
    along with their own: they are not offered to the model, and the client gets a warning.
    """
    shown = []
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise InvalidParameter(f"tools[{index}].type: expected a text", param=f"tools[{index}].type")
        if kind in _TOOL_FIELDS:
            fields = _TOOL_FIELDS[kind]
            known = {name: value for name, value in tool.items() if name in ("type", "name") or name in fields}
            shown.append({**fields, **known})
        else:
            warnings.append(f"tools[{index}]: tools of type {kind[:64]!r} are not supported and were left out")
    return shown


def _tool_choice(choice: ToolChoice | None, warnings: list[str]) -> ToolChoice | None:
    """The choice; if it names a tool that was left out, the model may choose."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed_tools(choice, warnings)
    if isinstance(kind, str) and kind not in _TOOL_FIELDS:
        warnings.append(f"tool_choice: tools of type {kind[:64]!r} are not supported; 'auto' was taken")
        return "auto"
    return choice


def _allowed_tools(choice: dict[str, Any], warnings: list[str]) -> ToolChoice:
    """The choice without the tools that were left out; if it names no other, no tool may be called."""
    tools = choice.get("tools")
    kinds = [tool.get("type") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    others = [kind for kind in kinds if isinstance(kind, str) and kind not in _TOOL_FIELDS]
    if not others or not isinstance(tools, list):
        return choice
    warnings.append(f"tool_choice: tools of type {others[0][:64]!r} are not supported and were left out")
    left = [tool for tool in tools if not (isinstance(tool, dict) and tool.get("type") in others)]
    return {**choice, "tools": left} if left else "none"


def _identifier(field: str, value: str | None) -> str | None:
    if value is not None and len(value) > MAX_IDENTIFIER:
        raise InvalidParameter(f"{field} may have at most {MAX_IDENTIFIER} characters, got {len(value)}", param=field)
    return value


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of a response, whose fields are flat, in the shape of chats, with the fields in an object of its type."""
    kind = tool["type"]
    fields = {name: value for name, value in tool.items() if name != "type" and value not in (None, False)}
    return {"type": kind, kind: fields}


def valid_metadata(metadata: dict[str, str] | None) -> dict[str, str]:
    """Metadata within OpenAI's limits.

    Raises:
        InvalidParameter: if it exceeds them.
    """
    found = metadata or {}
    if len(found) > MAX_METADATA:
        raise InvalidParameter(f"metadata may hold at most {MAX_METADATA} entries, got {len(found)}", param="metadata")
    for key, value in found.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidParameter(
                f"metadata: keys may have {MAX_METADATA_KEY} characters and values {MAX_METADATA_VALUE}, "
                f"got {len(key)} and {len(value)}",
                param="metadata",
            )
    return found
