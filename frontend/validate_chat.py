"""Checks of chat requests: messages, template variables. See `validate.py`."""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.frontend.chat_template import ChatTemplate
from penstock.frontend.errors import InvalidParameter, InvalidRequest, TooManyValues, UnsupportedParameter
from penstock.frontend.json_size import JsonSize, TooManyValuesError
from penstock.frontend.schema import ChatRequest, without_collecting
from penstock.frontend.template_calls import Chat
from penstock.frontend.validate import Rules, ValidRequest, check_text_size, validate_common
from penstock.frontend.validate_tools import ValidTools, validate_tools

MAX_MESSAGES = 2048
MAX_TOOL_CALLS = 128
MAX_TEMPLATE_VARIABLES = 32

_MESSAGE_FIELDS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
)

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ValidConversation:
    """Messages that a chat template can be given, and how to render them."""

    messages: Chat
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ValidChat:
    """A chat request, checked; not rendered yet."""

    common: ValidRequest
    conversation: ValidConversation
    tools: ValidTools | None
    include_reasoning: bool


def validate_chat(request: ChatRequest, rules: Rules, template: ChatTemplate | None) -> ValidChat:
    """Check a chat request.

    Raises:
        InvalidRequest: one of its kinds (see `errors.py`).
    """
    field, max_tokens = "max_completion_tokens", request.max_completion_tokens
    if max_tokens is None:
        field, max_tokens = "max_tokens", request.max_tokens
    common = validate_common(request, rules, max_tokens=max_tokens, max_tokens_field=field)
    tools = validate_tools(request.tools, request.tool_choice, request.parallel_tool_calls, template, rules.tool_format)
    return ValidChat(
        common=common,
        conversation=validate_conversation(
            request.messages,
            rules,
            template,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=with_effort(request.reasoning_effort, request.chat_template_kwargs, template),
            tools=None if tools is None else tools.definitions,
        ),
        tools=tools,
        include_reasoning=request.include_reasoning is not False,
    )


def with_effort(
    effort: str | None, variables: dict[str, Any] | None, template: ChatTemplate | None
) -> dict[str, Any] | None:
    """The template's variables; `reasoning_effort` is one of them where the template reads it."""
    if effort is None:
        return variables
    if template is None or "reasoning_effort" not in template.extra_variables:
        raise UnsupportedParameter(
            "reasoning_effort is not supported: this model's chat template does not read it", param="reasoning_effort"
        )
    return {"reasoning_effort": effort, **(variables or {})}


def validate_conversation(
    messages: list[dict[str, Any]] | None,
    rules: Rules,
    template: ChatTemplate | None,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: dict[str, Any] | None,
    tools: list[dict[str, Any]] | None = None,
) -> ValidConversation:
    """Check messages and template variables, also those of /tokenize."""
    if template is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions, or serve it with --chat-template")
    if messages is None:
        raise InvalidParameter("messages is required", param="messages")
    if not messages:
        raise InvalidParameter("messages is empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParameter(
            f"messages may hold {MAX_MESSAGES} messages at most, got {len(messages)}", param="messages"
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidParameter(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    size = JsonSize()
    chat = [_message(f"messages[{index}]", message, template, size) for index, message in enumerate(messages)]
    for index, message in enumerate(chat):
        if isinstance(message.get("content"), str):
            check_text_size(f"messages[{index}].content", message["content"], rules)
    return ValidConversation(
        messages=chat,
        add_generation_prompt=not continue_final_message and add_generation_prompt is not False,
        continue_final_message=bool(continue_final_message),
        variables=_variables(variables or {}, template),
        tools=tools,
    )


def _message(field: str, message: dict[str, Any], template: ChatTemplate, size: JsonSize) -> dict[str, Any]:
    """A message as the template sees it. Unknown fields go along if the template has their name in it.

    `size` has counted the values of the messages before.
    """
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidParameter(
            f"{field}.role must be a name such as 'user' (letters, digits, '_' and '-', 64 at most)",
            param=f"{field}.role",
        )
    if role == "developer" and "developer" not in template.source:
        role = "system"  # OpenAI's newer name of the same thing
    content = _content(f"{field}.content", message.get("content"))
    if content is None and role != "assistant":
        raise InvalidParameter(f"{field}.content is required", param=f"{field}.content")
    known = {name: value for name, value in message.items() if name in _MESSAGE_FIELDS or name in template.words}
    known |= {"role": role, "content": content}
    if message.get("tool_calls") is not None:
        known["tool_calls"] = _tool_calls(f"{field}.tool_calls", message["tool_calls"], size)
    return known


def _content(field: str, content: Any) -> str | None:
    """Content is a text, or a list of parts of type text (joined with line breaks)."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"{field}: expected a text or a list of parts", param=field)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise InvalidParameter(f"{field}[{index}]: expected an object with type 'text'", param=field)
        if part.get("type") != "text":
            raise UnsupportedParameter(
                f"{field}[{index}]: this model takes parts of type 'text' only", param=f"{field}[{index}].type"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidParameter(f"{field}[{index}].text: expected a text", param=f"{field}[{index}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(field: str, tool_calls: Any, size: JsonSize) -> list[Any]:
    """Past calls of an assistant message. Templates want their arguments as objects, clients send JSON text."""
    if not isinstance(tool_calls, list) or not all(isinstance(call, dict) for call in tool_calls):
        raise InvalidParameter(f"{field}: expected a list of objects", param=field)
    if len(tool_calls) > MAX_TOOL_CALLS:
        raise InvalidParameter(f"{field} may hold {MAX_TOOL_CALLS} at most, got {len(tool_calls)}", param=field)
    calls: list[Any] = []
    for call in tool_calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = _arguments(f"{field}[{len(calls)}].function.arguments", function["arguments"], size)
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return calls


def _arguments(field: str, text: str, size: JsonSize) -> Any:
    """What the text says, or the text if that is no JSON."""
    written = text.encode(errors="replace")
    try:
        size.begin()
        size.feed(written)
        with without_collecting():
            return msgspec.json.decode(written)
    except TooManyValuesError as error:
        raise TooManyValues(f"{field}: in the messages together {error}", param=field) from None
    except (msgspec.DecodeError, RecursionError):
        return text


def _variables(variables: dict[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """Template variables: only such as the template reads, only plain values."""
    field = "chat_template_kwargs"
    if len(variables) > MAX_TEMPLATE_VARIABLES:
        raise InvalidParameter(
            f"{field} may hold {MAX_TEMPLATE_VARIABLES} entries at most, got {len(variables)}", param=field
        )
    for name, value in variables.items():
        if name not in template.extra_variables:
            known = ", ".join(sorted(template.extra_variables)) or "none"
            raise InvalidParameter(
                f"{field}: this model's chat template has no variable {name[:64]!r} (it has: {known})", param=field
            )
        if value is not None and not isinstance(value, str | int | float | bool):
            raise InvalidParameter(f"{field}.{name} must be a text, a number or a boolean", param=field)
    return variables
