"""Checks of Messages requests, which are chat requests in another shape. See `frontend/validation/common.py`."""

import re
from dataclasses import dataclass, replace
from typing import Any

from penstock.frontend import schema
from penstock.frontend.api.text_model import TextModel
from penstock.frontend.errors import InvalidParameter, InvalidRequest
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.validation.chat import ValidChat, thinking_switch, validate_chat
from penstock.frontend.validation.common import Rules, refuse_unsupported
from penstock.frontend.validation.tokens import shown
from penstock.frontend.validation.tools import check_function
from penstock.parts.anthropic.frontend.conversation import Conversation, conversation_of
from penstock.parts.anthropic.frontend.schema import (
    CountTokensRequest,
    MessagesRequest,
    OutputFormatConfig,
    ThinkingConfig,
)

_THINKING_TYPES = {"enabled": True, "adaptive": True, "disabled": False, "between_tools": False}
"""Types of `thinking` -> whether the model should think."""

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Efforts -> their names in templates."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_BUDGET = "thinking_budget"
"""The template variable for the number of tokens to think for, in templates that have one."""

_OUR_WORDS = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
"""Fields of a chat -> their names in this API."""

_MESSAGE_FIELD = re.compile(r"messages\[([0-9]+)\]")


@dataclass(frozen=True, slots=True)
class ValidMessages:
    """A Messages request, checked; not rendered yet."""

    chat: ValidChat
    is_prompt_only: bool  # no answer is wanted: the prompt should be cached
    hides_thinking: bool  # show that there is thinking, but not its text


def validate_messages(request: MessagesRequest, rules: Rules, model: TextModel) -> ValidMessages:
    """Check a Messages request.

    Raises:
        InvalidRequest: one of its kinds (see `frontend/errors.py`).
    """
    if request.max_tokens is None:
        raise InvalidParameter("max_tokens is required", param="max_tokens")
    if request.max_tokens < 0:  # elsewhere -1 stands for no limit
        raise InvalidParameter(
            f"max_tokens must be at least 0 (which only caches the prompt), got {shown(request.max_tokens)}",
            param="max_tokens",
        )
    is_prompt_only = request.max_tokens == 0
    notes: list[str] = []
    chat = chat_request(
        request,
        notes,
        # The engine samples one token in any case; it is not shown.
        max_tokens=1 if is_prompt_only else request.max_tokens,
        stop=request.stop_sequences,
        stream=request.stream,
        **request.draws(),
        priority=request.priority,
        cache_salt=request.cache_salt,
        user=None if request.metadata is None else request.metadata.user_id,
    )
    valid = _validated(request, chat, rules, model, notes)
    common = replace(valid.common, include_usage=True)  # every answer includes usage
    display = None if request.thinking is None else request.thinking.display
    return ValidMessages(replace(valid, common=common), is_prompt_only, display == "omitted")


def validate_prompt(request: CountTokensRequest, rules: Rules, model: TextModel) -> ValidChat:
    """Check a request whose prompt tokens are to be counted.

    Raises:
        InvalidRequest: as the request with this prompt would.
    """
    notes: list[str] = []
    return _validated(request, chat_request(request, notes), rules, model, notes)


def chat_request(request: CountTokensRequest, notes: list[str], **fields: Any) -> schema.ChatRequest:
    """The chat request with the fields that all Messages requests share, and the given ones.

    `notes` gets what the client is told of tools that are left out.
    """
    tools = _tools(request.tools or [], notes) or None
    choice = _offered_choice(request, notes)
    if choice is not None and choice.get("type") in ("any", "tool") and not tools:
        raise InvalidParameter(f"tool_choice {choice['type']!r} needs tools", param="tool_choice")
    return schema.ChatRequest(
        model=request.model,
        tools=tools,
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=None if choice is None else not _disables_parallel(choice),
        response_format=_response_format(request),
        **fields,
    )


def _validated(
    request: CountTokensRequest, chat: schema.ChatRequest, rules: Rules, model: TextModel, notes: list[str]
) -> ValidChat:
    refuse_unsupported(request)
    found = conversation_of(request, takes_images=rules.images is not None)
    warnings = [*notes, *_without_effect(request), *found.warnings]
    chat.messages = found.messages
    if found.is_continued:
        chat.continue_final_message, chat.add_generation_prompt = True, False
    thinks = _thinks(request.thinking)
    if model.template is not None:
        variables = _variables(request, model.template, thinks, warnings, reasons=model.reasoning_format is not None)
        chat.chat_template_kwargs = variables | (request.chat_template_kwargs or {})
    chat.include_reasoning = thinks
    try:
        valid = validate_chat(chat, rules, model.template)
    except InvalidRequest as error:
        raise _in_our_words(error, found) from None
    common, grammar = valid.common, valid.common.grammar
    if grammar is not None:  # parsed later, when it may still be refused
        grammar = replace(grammar, field="output_config.format.schema")
    if valid.conversation.images:
        images = tuple(replace(image, field=_our_field(image.field, found)) for image in valid.conversation.images)
        valid = replace(valid, conversation=replace(valid.conversation, images=images))
    return replace(valid, common=replace(common, grammar=grammar, warnings=(*common.warnings, *warnings)))


def _thinks(thinking: ThinkingConfig | None) -> bool:
    """Whether thinking is wanted; not by default, as in Anthropic's API."""
    if thinking is None:
        return False
    if thinking.type not in _THINKING_TYPES:
        raise InvalidParameter(
            f"thinking.type must be one of {', '.join(_THINKING_TYPES)}, got {thinking.type[:64]!r}",
            param="thinking.type",
        )
    if thinking.display not in (None, "summarized", "omitted"):
        raise InvalidParameter("thinking.display must be 'summarized' or 'omitted'", param="thinking.display")
    budget = thinking.budget_tokens
    if thinking.type == "enabled" and budget is None:
        raise InvalidParameter("thinking.budget_tokens is required for type 'enabled'", param="thinking.budget_tokens")
    if budget is not None and not 1 <= budget < 2**31:
        raise InvalidParameter("thinking.budget_tokens must be at least 1", param="thinking.budget_tokens")
    return _THINKING_TYPES[thinking.type]


def _variables(
    request: CountTokensRequest, template: ChatTemplate, thinks: bool, warnings: list[str], *, reasons: bool
) -> dict[str, Any]:
    """The template's variables for thinking and effort; settings without a variable become warnings."""
    known, switch, thinking = template.extra_variables, thinking_switch(template), request.thinking
    variables: dict[str, Any] = {} if switch is None else {switch: thinks}
    if thinks and not reasons:
        warnings.append("thinking: no effect, this model does not reason before it answers")
    elif thinking is not None and not thinks and reasons and switch is None:
        warnings.append("thinking: this model's chat template cannot switch it off; the answer is told without it")
    if thinks and thinking is not None and thinking.budget_tokens is not None and reasons:
        if _BUDGET in known:
            variables[_BUDGET] = thinking.budget_tokens
        else:
            warnings.append("thinking.budget_tokens: no effect, this model's chat template does not read it")
    effort = None if request.output_config is None else request.output_config.effort
    if effort is not None:
        if effort not in _EFFORTS:
            raise InvalidParameter(
                f"output_config.effort must be one of {', '.join(_EFFORTS)}, got {effort[:64]!r}",
                param="output_config.effort",
            )
        if "reasoning_effort" in known:
            variables["reasoning_effort"] = _EFFORTS[effort]
        else:
            warnings.append("output_config.effort: no effect, this model's chat template does not read it")
    return variables


def _tools(tools: list[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """The client's tools in the shape of chats.

    Tools of other types would be run by Anthropic's servers (a search), or are known to Anthropic's models only (an
    editor). Agents offer them along with their own: they are not offered to the model, and the client is told.
    """
    offered = []
    for index, tool in enumerate(tools):
        if _is_own(tool):
            offered.append(_tool(f"tools[{index}]", tool))
        else:
            kind = str(tool.get("type"))[:64]
            notes.append(f"tools[{index}]: tools of type {kind!r} are not supported and were left out")
    return offered


def _is_own(tool: dict[str, Any]) -> bool:
    """Whether it is a tool with a schema, which the client runs."""
    return tool.get("type") in (None, "custom")


def _tool(at: str, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the shape of chats."""
    schema_of_input = tool.get("input_schema")
    if not isinstance(schema_of_input, dict):
        raise InvalidParameter(f"{at}.input_schema: expected an object, a JSON schema", param=f"{at}.input_schema")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    check_function(at, function)
    return {"type": "function", "function": {**function, "parameters": schema_of_input}}


def _offered_choice(request: CountTokensRequest, notes: list[str]) -> dict[str, Any] | None:
    """The choice; if it names a tool that was left out, the model may choose."""
    choice = request.tool_choice
    if choice is None or choice.get("type") != "tool":
        return choice
    named = [tool for tool in request.tools or () if tool.get("name") == choice.get("name")]
    if not named or any(map(_is_own, named)):
        return choice
    notes.append("tool_choice: the tool was left out; 'auto' was taken")
    return {**choice, "type": "auto"}


def _tool_choice(choice: dict[str, Any]) -> str | dict[str, Any]:
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    if isinstance(kind, str) and kind in _CHOICES:
        return _CHOICES[kind]
    raise InvalidParameter(
        "tool_choice must have the type 'auto', 'any' or 'none', or 'tool' and a tool's name", param="tool_choice"
    )


def _disables_parallel(choice: dict[str, Any]) -> bool:
    asked = choice.get("disable_parallel_tool_use")
    if asked is not None and not isinstance(asked, bool):
        field = "tool_choice.disable_parallel_tool_use"
        raise InvalidParameter(f"{field}: expected a boolean", param=field)
    return bool(asked)


def _response_format(request: CountTokensRequest) -> schema.ResponseFormat | None:
    asked: OutputFormatConfig | None = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        asked = request.output_config.format
    if asked is None:
        return None
    if asked.type != "json_schema":
        raise InvalidParameter(
            f"output_config.format.type must be 'json_schema', got {asked.type[:64]!r}",
            param="output_config.format.type",
        )
    if not asked.schema:
        raise InvalidParameter("output_config.format.schema is required", param="output_config.format.schema")
    return schema.ResponseFormat("json_schema", schema.JsonSchemaFormat(name="answer", schema=asked.schema))


def _without_effect(request: CountTokensRequest) -> list[str]:
    """Warnings about accepted fields that cannot change the answer."""
    notes = {
        "context_management": request.context_management and "past turns stay as they are sent",
        "speed": request.speed not in (None, "standard") and "there is only one",
    }
    if isinstance(request, MessagesRequest):
        notes["diagnostics"] = request.diagnostics and "prompts are not compared"
        notes["inference_geo"] = request.inference_geo and "the model runs where this server does"
        if request.service_tier not in (None, "auto", "standard_only"):
            raise InvalidParameter("service_tier must be 'auto' or 'standard_only'", param="service_tier")
    return [f"{name}: no effect, {note}" for name, note in notes.items() if note]


def _in_our_words(error: InvalidRequest, found: Conversation) -> InvalidRequest:
    """The error, with the names of fields in the request as it was sent."""
    param = error.param or ""
    for theirs, ours in _OUR_WORDS.items():
        if param == theirs or param.startswith(f"{theirs}."):
            error.param = ours + param.removeprefix(theirs)
            error.message = error.message.replace(theirs, ours, 1)
            return error
    if param.startswith("tools["):
        error.param, error.message = param.replace(".function", "", 1), error.message.replace(".function", "", 1)
    if param.startswith("messages"):
        error.param, error.message = _our_field(param, found), _our_field(error.message, found)
    return error


def _our_field(text: str, found: Conversation) -> str:
    """A text in which the chat's messages are replaced by those of the request as it was sent."""

    def field_of(match: re.Match[str]) -> str:
        index = int(match[1])
        return found.fields[index] if index < len(found.fields) else match[0]

    return _MESSAGE_FIELD.sub(field_of, text)
