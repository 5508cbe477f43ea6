"""Checks of tools and of how they may be used. See `validate.py`."""

import re
from dataclasses import dataclass
from typing import Any

from penstock.frontend.calls.format import ToolFormat
from penstock.frontend.chat_template import ChatTemplate
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter

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
    is_forced: bool = False
    """The output must be calls, of the tools in `names`."""

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions of the tools in `names`."""
        return [tool["function"] for tool in self.definitions if tool["function"]["name"] in self.names]

    @property
    def schemas(self) -> dict[str, Any]:
        """The JSON schema of each tool's arguments."""
        return {function["name"]: function.get("parameters") or {} for function in self.functions}

    @property
    def has_strict(self) -> bool:
        """Some tool's arguments must match their schema whenever it is called."""
        return any(tool["function"].get("strict") for tool in self.definitions)


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
    choice, wanted = check_tool_choice(tool_choice)
    is_forced = choice in ("required", "named")
    if not tools and not is_forced:
        return None
    param = "tools" if tools else "tool_choice"
    if template is None or not template.reads_tools:
        raise UnsupportedParameter("this model's chat template does not take tools", param=param)
    if tool_format is None:
        raise UnsupportedParameter("tools are switched off on this server (--tool-call-parser none)", param=param)
    if not tools:
        raise InvalidParameter(f"tool_choice {choice!r} needs tools", param="tool_choice")
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter(f"tools may hold {MAX_TOOLS} tools at most, got {len(tools)}", param="tools")
    names = [_check_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidParameter(f"tools: {twice!r} is there twice", param="tools")
    if choice == "none":
        return None
    if choice != "named":
        return ValidTools(tools, frozenset(names), parallel is not False, tool_format, is_forced)
    if wanted not in names:
        raise InvalidParameter(f"tool_choice names {wanted!r}, which is none of the tools", param="tool_choice")
    return ValidTools(tools, frozenset({wanted}), False, tool_format, is_forced)


def check_tool_choice(choice: ToolChoice | None) -> tuple[str, str]:
    """What the model may do: "auto", "none", "required" or "named", and with the last the tool's name.

    Raises:
        InvalidParameter: for a choice that is none of these.
    """
    if isinstance(choice, dict):
        function = choice.get("function", choice)  # chat completions put the name inside, responses do not
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise InvalidParameter("tool_choice: an object must name a tool of type 'function'", param="tool_choice")
        return "named", name[:64]
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", ""
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
