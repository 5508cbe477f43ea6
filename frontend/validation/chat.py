"""Checks of chat requests: messages, template variables. See `common.py`."""

import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.frontend.errors import InvalidParameter, InvalidRequest, TooManyValues, UnsupportedParameter
from penstock.frontend.image_source import KINDS as IMAGE_KINDS
from penstock.frontend.image_source import ImageLimits, ImageSource, image_of_part
from penstock.frontend.json_size import JsonSize, TooManyValuesError
from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.custom_input import arguments_of
from penstock.frontend.parsing.parser import ValidTools
from penstock.frontend.schema import ChatRequest
from penstock.frontend.text.chat_template import RESERVED, ChatTemplate, ValidConversation
from penstock.frontend.validation.common import (
    Rules,
    ValidRequest,
    check_num_best,
    check_text_size,
    validate_common,
    without_collecting,
)
from penstock.frontend.validation.functions import asks_for_functions, validate_functions, with_tool_messages
from penstock.frontend.validation.tools import validate_tools

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 1024
"""Limit for one message."""

MAX_ARGUMENT_NUMBERS = 65_536
"""Limit for the arguments of all past calls together."""

MAX_TEMPLATE_VARIABLES = 128

_FIELD = "chat_template_kwargs"
_THINKING = ("enable_thinking", "thinking")
"""Variables that switch reasoning on and off in templates without an effort."""

_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Fields of a message that are strings, if they are there."""
_MESSAGE_FIELDS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
)

_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text parts, in chats and in responses, and the field with the text."""

_UNREADABLE = {
    **dict.fromkeys(("image", *IMAGE_KINDS), "an image"),
    **dict.fromkeys(("file", "input_file", "document"), "a file"),
    **dict.fromkeys(("input_audio", "audio_url"), "a recording"),
    "video_url": "a video",
}
"""Parts of tool results that become a note if the model cannot read them: a result stays in the conversation, so that
refusing it would refuse all further requests. What users send themselves is refused."""

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ValidChat:
    """A chat request, checked; not rendered yet."""

    common: ValidRequest
    conversation: ValidConversation
    tools: ValidTools | None
    include_reasoning: bool
    has_functions: bool = False  # the tools were sent as functions, and are answered as such


def validate_chat(request: ChatRequest, rules: Rules, template: ChatTemplate | None) -> ValidChat:
    """Check a chat request.

    Raises:
        InvalidRequest: one of its kinds (see `errors.py`).
    """
    field, max_tokens = "max_completion_tokens", request.max_completion_tokens
    if max_tokens is None:
        field, max_tokens = "max_tokens", request.max_tokens
    num_best = check_num_best("top_logprobs", request.top_logprobs, rules)
    if num_best > 0 and not request.logprobs:
        raise InvalidParameter("top_logprobs needs logprobs to be true", param="top_logprobs")
    common = validate_common(
        request,
        rules,
        max_tokens=max_tokens,
        max_tokens_field=field,
        prompt_field="messages",
        num_best=max(num_best, 0) if request.logprobs else -1,
    )
    if request.store:
        note = "store: no effect, chat completions are not stored; /v1/responses stores responses"
        common = replace(common, warnings=(*common.warnings, note))
    tools = None
    has_functions = asks_for_functions(request)
    if has_functions:
        tools = validate_functions(request, template, rules)
    elif request.tools is not None or request.tool_choice is not None:
        parallel = request.parallel_tool_calls
        tools = validate_tools(request.tools, request.tool_choice, parallel, template, rules)
    if tools is not None and tools.warnings:
        common = replace(common, warnings=(*common.warnings, *tools.warnings))
    return ValidChat(
        common=common,
        conversation=validate_conversation(
            request.messages,
            rules,
            template,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=with_fields(
                request.chat_template_kwargs, reasoning_effort=request.reasoning_effort, verbosity=request.verbosity
            ),
            tools=None if tools is None else tools.definitions,
        ),
        tools=tools,
        include_reasoning=request.include_reasoning is not False,
        has_functions=has_functions,
    )


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
    """Check messages and template variables, including those of /tokenize."""
    if template is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions, or serve it with --chat-template")
    if messages is None:
        raise InvalidParameter("messages is required", param="messages")
    if not messages:
        raise InvalidParameter("messages is empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParameter(
            f"messages may hold at most {MAX_MESSAGES} messages, got {len(messages)}", param="messages"
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidParameter(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    messages = with_tool_messages(messages)
    if rules.why_no_images and rules.images is None:
        _refuse_images(messages, rules.why_no_images)
    images: list[ImageSource] = []
    unread: dict[str, None] = {}
    chat = [
        _message(f"messages[{index}]", message, template, rules.images, images, unread)
        for index, message in enumerate(messages)
    ]
    if calling := [index for index, message in enumerate(messages) if message.get("tool_calls") is not None]:
        size = JsonSize(MAX_ARGUMENT_NUMBERS)
        for index in calling:
            calls = messages[index]["tool_calls"]
            chat[index]["tool_calls"] = _tool_calls(f"messages[{index}].tool_calls", calls, rules, size)
            if rules.hides_calls:
                chat[index] = _with_written_calls(chat[index], rules.tool_format)
    for index, message in enumerate(chat):
        content = message.get("content")
        if isinstance(content, str):
            check_text_size(f"messages[{index}].content", content, rules)
        elif content is not None:  # a list of parts
            text = "".join(part.get("text", "") for part in content)
            check_text_size(f"messages[{index}].content", text, rules)
    settings, warnings = settings_for(template, variables or {})
    notes = tuple(f"messages: {what} in a tool's result became a note: this model cannot read it" for what in unread)
    return ValidConversation(
        messages=chat,
        add_generation_prompt=not continue_final_message and add_generation_prompt is not False,
        continue_final_message=bool(continue_final_message),
        variables=settings,
        tools=tools,
        warnings=(*warnings, *notes),
        images=tuple(images),
        example=rules.tool_format.abstract_example if tools and rules.tool_format is not None else "",
    )


def _with_written_calls(message: dict[str, Any], tool_format: ToolFormat | None) -> dict[str, Any]:
    """The message with its calls in its content, as the model writes them, if the template shows none."""
    written = "" if tool_format is None else tool_format.written(message["tool_calls"])
    if not written:
        return message
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (message.get("content"), written)))}


def _message(
    field: str,
    message: dict[str, Any],
    template: ChatTemplate,
    limits: ImageLimits | None,
    images: list[ImageSource],
    unread: dict[str, None],
) -> dict[str, Any]:
    """A message as the template sees it. Unknown fields are passed on if the template contains their name.

    Its images are appended to `images`; what became a note, because the model cannot read it, to `unread`.
    """
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidParameter(
            f"{field}.role must be a name such as 'user' (letters, digits, '_' and '-', at most 64)",
            param=f"{field}.role",
        )
    noted = unread if role == "tool" else None
    content = _content(f"{field}.content", message.get("content"), limits, images, noted)
    if content is None and role != "assistant":
        if "content" not in message and role != "tool":
            raise InvalidParameter(f"{field}.content is required", param=f"{field}.content")
        content = ""
    if role == "assistant" and isinstance(content, list):
        raise InvalidParameter(f"{field}: what the model has said holds no images", param=f"{field}.content")
    for name in _TEXT_FIELDS:
        if not isinstance(message.get(name), str | None):
            raise InvalidParameter(f"{field}.{name} must be a string", param=f"{field}.{name}")
    if role != "assistant" and message.get("tool_calls"):
        raise InvalidParameter(f"{field}.tool_calls: only the assistant calls tools", param=f"{field}.tool_calls")
    known = {name: value for name, value in message.items() if name in _MESSAGE_FIELDS or name in template.words}
    return known | {"role": role, "content": content}


def _content(
    field: str, content: Any, limits: ImageLimits | None, images: list[ImageSource], unread: dict[str, None] | None
) -> str | list[dict[str, str]] | None:
    """Content is a string, or a list of parts of type text (joined with line breaks).

    If there are images among the parts, it stays a list in the form that templates know: {"type": "image"} and texts.
    `unread`: where to note parts that the model cannot read; None: they are refused.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"{field}: expected a string or a list of parts", param=field)
    texts: list[str] = []
    parts: list[dict[str, str]] = []
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise InvalidParameter(f"{field}[{index}]: expected an object with type 'text'", param=field)
        kind = part.get("type")
        if limits is not None and kind in IMAGE_KINDS:
            if len(images) == limits.max_images:
                raise InvalidParameter(f"{field}: a request may have at most {limits.max_images} images", param=field)
            images.append(image_of_part(f"{field}[{index}]", part, limits))
            parts.append({"type": "image"})
            continue
        what = _UNREADABLE.get(kind) if isinstance(kind, str) else None
        if unread is not None and what is not None:
            unread[what] = None
            texts.append(f"[{what} that this model cannot read]")
            parts.append({"type": "text", "text": texts[-1]})
            continue
        key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise UnsupportedParameter(
                f"{field}[{index}]: this model accepts only parts of type {_kinds(limits)}",
                param=f"{field}[{index}].type",
            )
        if not isinstance(part.get(key), str):
            raise InvalidParameter(f"{field}[{index}].{key}: expected a string", param=f"{field}[{index}].{key}")
        texts.append(part[key])
        parts.append({"type": "text", "text": part[key]})
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _refuse_images(messages: list[dict[str, Any]], why: str) -> None:
    """Say why a model that sees is served as text only. In results of tools, images become notes."""
    for index, message in enumerate(messages):
        content = message.get("content") if message.get("role") != "tool" else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") in IMAGE_KINDS:
                field = f"messages[{index}].content[{number}]"
                raise UnsupportedParameter(
                    f"{field}: this model is served as text only, because {why}", param=f"{field}.type"
                )


def _kinds(limits: ImageLimits | None) -> str:
    return "'text'" if limits is None else "'text' and 'image_url'"


def _tool_calls(field: str, tool_calls: Any, rules: Rules, size: JsonSize) -> list[Any]:
    """Past calls of an assistant message. Templates need their arguments as objects, clients send JSON text.

    `size` has counted the values of the earlier messages.
    """
    if not isinstance(tool_calls, list) or not all(isinstance(call, dict) for call in tool_calls):
        raise InvalidParameter(f"{field}: expected a list of objects", param=field)
    if len(tool_calls) > MAX_TOOL_CALLS:
        raise InvalidParameter(f"{field} may hold at most {MAX_TOOL_CALLS} calls, got {len(tool_calls)}", param=field)
    calls: list[Any] = []
    for call in tool_calls:
        if call.get("type") == "custom":
            call = _as_function_call(f"{field}[{len(calls)}]", call, rules)
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            where, text = f"{field}[{len(calls)}].function.arguments", function["arguments"]
            check_text_size(where, text, rules)
            arguments = _arguments(where, text, size)
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return calls


def _as_function_call(field: str, call: dict[str, Any], rules: Rules) -> dict[str, Any]:
    """The past call of a custom tool as the function that the model is shown."""
    custom = call.get("custom")
    name, text = (custom.get("name"), custom.get("input")) if isinstance(custom, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        raise InvalidParameter(f"{field}.custom: expected a name and an input, both texts", param=f"{field}.custom")
    check_text_size(f"{field}.custom.input", text, rules)
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments_of(text)}}


def _arguments(field: str, text: str, size: JsonSize) -> Any:
    """Return the decoded arguments, or the text if it is not JSON."""
    written = text.encode(errors="replace")
    try:
        size.begin()
        size.feed(written)
        with without_collecting():
            return msgspec.json.decode(written)
    except TooManyValuesError as error:
        raise TooManyValues(f"{field}: over all messages, {error}", param=field) from None
    except (msgspec.DecodeError, RecursionError):
        return text


def with_fields(variables: dict[str, Any] | None, **fields: str | None) -> dict[str, Any] | None:
    """Merge the request's variables with the given fields that are set; a variable wins over a field of its name."""
    given = {name: value for name, value in fields.items() if value is not None}
    return {**given, **(variables or {})} if given else variables


def settings_for(template: ChatTemplate, variables: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the variables that this template reads, and warnings about the others.

    An effort is passed on if the template reads one. If not, it switches reasoning on or off, if the template can.

    Raises:
        InvalidParameter: there are too many variables, or one is not a plain value, or not a variable of any template.
    """
    if len(variables) > MAX_TEMPLATE_VARIABLES:
        raise InvalidParameter(
            f"{_FIELD} may hold at most {MAX_TEMPLATE_VARIABLES} entries, got {len(variables)}", param=_FIELD
        )
    known = template.extra_variables
    settings: dict[str, Any] = {}
    warnings = []
    for name, value in variables.items():
        if name in known:
            settings[name] = _plain(name, value)
        elif name in RESERVED:
            raise InvalidParameter(f"{_FIELD}.{name} cannot be set: chat templates have no such variable", param=_FIELD)
        elif name == "verbosity":
            if value != "medium":  # the default
                warnings.append("verbosity: no effect, this model's chat template does not read it")
        elif name != "reasoning_effort":
            listed = ", ".join(sorted(known)) or "none"
            warnings.append(f"{_FIELD}.{name[:64]}: no effect, this model's chat template reads: {listed}")
    effort = variables.get("reasoning_effort")
    if effort is not None:
        switch = thinking_switch(template)
        if switch is not None and ("reasoning_effort" not in known or effort == "none"):
            settings.setdefault(switch, effort != "none")
        elif "reasoning_effort" not in known:
            warnings.append("reasoning_effort: no effect, this model's chat template does not read it")
    return settings, tuple(warnings)


def thinking_switch(template: ChatTemplate) -> str | None:
    """The variable that switches reasoning on and off in this template, if there is one."""
    return next((name for name in _THINKING if name in template.extra_variables), None)


def _plain(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, str | int | float | bool):
        raise InvalidParameter(f"{_FIELD}.{name} must be a string, a number or a boolean", param=_FIELD)
    return value
