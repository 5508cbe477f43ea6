"""Checks of /v1/responses: the same request as a chat's in another dress. See `validate.py`."""

from dataclasses import dataclass, replace
from typing import Any

from penstock.frontend.chat_template import ChatTemplate
from penstock.frontend.errors import InvalidParameter, InvalidRequest, UnsupportedParameter
from penstock.frontend.grammars import GrammarSource
from penstock.frontend.response_items import Item, as_messages
from penstock.frontend.schema_responses import ReasoningOptions, ResponsesRequest, TextFormat, TextOptions
from penstock.frontend.validate import Rules, ValidRequest, validate_common
from penstock.frontend.validate_chat import ValidChat, validate_conversation, with_effort
from penstock.frontend.validate_grammar import check_ending, schema_source
from penstock.frontend.validate_tools import ToolChoice, validate_tools

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
_INCLUDABLE = ("reasoning.encrypted_content",)
"""Reasoning always comes in the clear in `content`, and may be sent back so: there is nothing to encrypt."""


@dataclass(frozen=True, slots=True)
class ValidResponse:
    """A responses request, checked; not rendered yet."""

    chat: ValidChat
    items: list[Item]  # of the whole conversation so far, instructions excepted
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


def validate_response(
    request: ResponsesRequest, rules: Rules, template: ChatTemplate | None, previous: list[Item]
) -> ValidResponse:
    """Check a responses request that goes on from `previous` items.

    Raises:
        InvalidRequest: one of its kinds (see `errors.py`).
    """
    field, max_tokens = "max_output_tokens", request.max_output_tokens
    if max_tokens is None:
        field, max_tokens = "max_tokens", request.max_tokens
    common = validate_common(request, rules, max_tokens=max_tokens, max_tokens_field=field)
    if common.n != 1:
        raise InvalidParameter(f"n must be 1 for a response, got {common.n}", param="n")
    if common.continuous_usage:
        raise UnsupportedParameter("stream_options.continuous_usage_stats is not supported", param="stream_options")
    _check_options(request)
    shown_tools = [_shown_tool(f"tools[{index}]", tool) for index, tool in enumerate(request.tools or [])]
    tools = validate_tools(
        [_chat_tool(tool) for tool in shown_tools],
        request.tool_choice,
        request.parallel_tool_calls,
        template,
        rules.tool_format,
    )
    items = previous + _input_items(request.input)
    try:
        conversation = validate_conversation(
            as_messages(items, request.instructions),
            rules,
            template,
            add_generation_prompt=True,
            continue_final_message=False,
            variables=with_effort(
                request.reasoning.effort if request.reasoning else None, request.chat_template_kwargs, template
            ),
            tools=None if tools is None else tools.definitions,
        )
    except InvalidRequest as error:
        if error.param is not None and error.param.startswith("messages"):
            error.param = "input"
        raise
    # Usage is part of every response.
    common = replace(common, include_usage=True, grammar=_grammar(request, common, rules))
    return ValidResponse(
        chat=ValidChat(common, conversation, tools, request.include_reasoning is not False),
        items=items,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        store=request.store is not False,
        metadata=_metadata(request.metadata),
        user=request.user,
        tools=shown_tools,
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=request.reasoning or ReasoningOptions(),
        text=TextOptions((request.text.format if request.text is not None else None) or TextFormat()),
        max_output_tokens=max_tokens,
    )


def _grammar(request: ResponsesRequest, common: ValidRequest, rules: Rules) -> GrammarSource | None:
    """What the text must match: said by `text.format`, or as in the other endpoints."""
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
    return schema_source("text.format.schema", text_format.schema)


def _input_items(given: str | list[Item] | None) -> list[Item]:
    if given is None:
        raise InvalidParameter("input is required", param="input")
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def _check_options(request: ResponsesRequest) -> None:
    """Refuse what would change the answer if it were honoured."""
    if request.prompt_logprobs is not None:
        raise UnsupportedParameter("prompt_logprobs is not supported for responses", param="prompt_logprobs")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise UnsupportedParameter("text.verbosity is not supported", param="text.verbosity")
    if request.truncation not in (None, "disabled"):
        raise UnsupportedParameter("truncation: only 'disabled' is supported", param="truncation")
    reasoning = request.reasoning or ReasoningOptions()
    if reasoning.summary not in (None, "auto") or reasoning.generate_summary not in (None, "auto"):
        raise UnsupportedParameter("reasoning.summary: only 'auto' is supported", param="reasoning.summary")
    for name in request.include or []:
        if name not in _INCLUDABLE:
            raise UnsupportedParameter(f"include: {name[:64]!r} is not supported", param="include")


def _shown_tool(field: str, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the fields that a response shows in any case."""
    if tool.get("type") != "function":
        raise UnsupportedParameter(f"{field}.type: only tools of type 'function' are supported", param=f"{field}.type")
    return {"parameters": None, "strict": False, **tool}


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Responses write a tool flat, chats with the function inside."""
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) not in (None, False)}
    return {"type": "function", "function": function}


def _metadata(metadata: dict[str, str] | None) -> dict[str, str]:
    found = metadata or {}
    if len(found) > MAX_METADATA:
        raise InvalidParameter(f"metadata may hold {MAX_METADATA} entries at most, got {len(found)}", param="metadata")
    for key, value in found.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidParameter(
                f"metadata: keys may have {MAX_METADATA_KEY} characters and values {MAX_METADATA_VALUE}, "
                f"got {len(key)} and {len(value)}",
                param="metadata",
            )
    return found
