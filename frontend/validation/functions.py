"""`functions`, `function_call` and messages of role `function`: what chats had before tools, turned into these.

A request with `functions` is answered in its own form: one call at most, in the message's `function_call`.
"""

import re
from typing import Any

from penstock.frontend.errors import InvalidParameter, InvalidRequest
from penstock.frontend.parsing.parser import ValidTools
from penstock.frontend.schema import ChatRequest
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.validation.common import Rules
from penstock.frontend.validation.tools import ToolChoice, validate_tools

Message = dict[str, Any]

_TOOL = re.compile(r"\btools(\[[0-9]+\])?(\.function)?")


def asks_for_functions(request: ChatRequest) -> bool:
    """Whether a request has functions, or chooses one."""
    return bool(request.functions) or request.function_call not in (None, "auto", "none")


def validate_functions(request: ChatRequest, template: ChatTemplate | None, rules: Rules) -> ValidTools | None:
    """Check functions as the tools that they are; return None if the model is offered none.

    Raises:
        InvalidParameter: naming what is wrong with a function or the choice.
        UnsupportedParameter: if this model, or this server, does not support tools.
    """
    if request.tools or request.tool_choice is not None:
        raise InvalidParameter("functions and tools exclude each other; tools are the newer form", param="functions")
    tools = [{"type": "function", "function": function} for function in request.functions or ()]
    try:
        return validate_tools(tools, _tool_choice(request.function_call), False, template, rules)
    except InvalidRequest as error:
        error.message = _in_old_words(error.message)
        error.param = None if error.param is None else _in_old_words(error.param)
        raise


def _tool_choice(choice: str | dict[str, Any] | None) -> ToolChoice | None:
    if isinstance(choice, dict):
        return {"type": "function", "function": choice}
    if choice not in (None, "auto", "none"):
        raise InvalidParameter(
            f"function_call must be 'auto', 'none' or an object with a name, got {choice[:64]!r}", param="function_call"
        )
    return choice


def _in_old_words(text: str) -> str:
    return _TOOL.sub(r"functions\1", text.replace("tool_choice", "function_call"))


def with_tool_messages(messages: list[Message]) -> list[Message]:
    """The messages, with a tool call for each `function_call`, and a tool's message for each of a function.

    Raises:
        InvalidParameter: a call has no name or no arguments.
    """
    if not any(message.get("function_call") or message.get("role") == "function" for message in messages):
        return messages
    made: list[Message] = []
    call_id, num_calls = "", 0
    for index, message in enumerate(messages):
        call = message.get("function_call")
        if message.get("role") == "function":
            made.append({**message, "role": "tool", "tool_call_id": call_id})
            call_id = ""
        elif call and not message.get("tool_calls"):
            num_calls += 1
            call_id = f"call{num_calls:05d}"  # nine letters and digits: Mistral's rule
            kept = {name: value for name, value in message.items() if name != "function_call"}
            made.append({**kept, "tool_calls": [_tool_call(f"messages[{index}].function_call", call, call_id)]})
        else:
            made.append(message)
    return made


def _tool_call(field: str, call: Any, call_id: str) -> dict[str, Any]:
    name, arguments = (call.get("name"), call.get("arguments")) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise InvalidParameter(f"{field}: expected an object with a name and arguments, both texts", param=field)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
