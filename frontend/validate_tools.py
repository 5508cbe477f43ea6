"""Checks of tools and of how they may be used. See `validate.py`."""

import re
from dataclasses import dataclass
from typing import Any

from penstock.frontend.chat_template import ChatTemplate
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.frontend.tool_formats import ToolFormat

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARACTERS = 32768

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

ToolChoice = str | dict[str, Any]


@dataclass(frozen=True, slots=True)
class ValidTools:
    """The tools that the model may call in this request."""

    definitions: list[dict[str, Any]]  # as the client wrote them: what the chat template shows
    names: frozenset[str]
    parallel: bool
    tool_format: ToolFormat


def validate_tools(
    tools: list[dict[str, Any]] | None,
    tool_choice: ToolChoice | None,
    parallel: bool | None,
    template: ChatTemplate | None,
    tool_format: ToolFormat | None,
) -> ValidTools | None:
    """Check tools in the shape of chat completions; None if the model is offered none.

    Raises:
        InvalidParameter: naming what is wrong with a tool or the choice.
        UnsupportedParameter: if this model, or this server, cannot honour them.
    """
    offers = check_tool_choice(tool_choice)
    if not tools:
        return None
    if template is None or not template.reads_tools:
        raise UnsupportedParameter("this model's chat template does not take tools", param="tools")
    if tool_format is None:
        raise UnsupportedParameter("tools are switched off on this server (--tool-call-parser none)", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter(f"tools may hold {MAX_TOOLS} tools at most, got {len(tools)}", param="tools")
    names = [_check_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidParameter(f"tools: {twice!r} is there twice", param="tools")
    if not offers:
        return None
    return ValidTools(tools, frozenset(names), parallel is not False, tool_format)


def check_tool_choice(choice: ToolChoice | None) -> bool:
    """Whether the model may call tools.

    Raises:
        UnsupportedParameter: for a choice that forces a call.
        InvalidParameter: for one that is none.
    """
    if choice is None or choice in ("auto", "none"):
        return choice != "none"
    if choice == "required" or isinstance(choice, dict):
        shown = repr(choice) if isinstance(choice, str) else "that names a tool"
        raise UnsupportedParameter(
            f"tool_choice {shown} is not supported yet: nothing here forces the model to call a tool; use 'auto'",
            param="tool_choice",
        )
    raise InvalidParameter(
        f"tool_choice must be 'auto', 'none', 'required' or an object that names a tool, got {choice[:64]!r}",
        param="tool_choice",
    )


def _check_tool(field: str, tool: dict[str, Any]) -> str:
    if tool.get("type") != "function":
        raise InvalidParameter(f"{field}.type must be 'function'", param=f"{field}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidParameter(f"{field}.function: expected an object", param=f"{field}.function")
    check_function(f"{field}.function", function)
    return str(function["name"])


def check_function(field: str, function: dict[str, Any]) -> None:
    """Check a function's name, description, parameters and `strict`."""
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParameter(
            f"{field}.name must have 1 to 64 letters, digits, '_', '-' or '.'", param=f"{field}.name"
        )
    description = function.get("description")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARACTERS):
        raise InvalidParameter(
            f"{field}.description must be a text of {MAX_DESCRIPTION_CHARACTERS} characters at most",
            param=f"{field}.description",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidParameter(f"{field}.parameters: expected an object, a JSON schema", param=f"{field}.parameters")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter(f"{field}.strict: expected a boolean", param=f"{field}.strict")
    if strict:
        raise UnsupportedParameter(
            f"{field}.strict is not supported yet: nothing here forces arguments to match their schema",
            param=f"{field}.strict",
        )
