"""Checks of tools and of tool_choice. See `common.py`."""

from typing import Any

from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.custom_input import InputGrammar
from penstock.frontend.parsing.parser import ValidTools, takes_in_names
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.validation.common import Rules, check_text_size
from penstock.frontend.validation.custom_tools import as_function

MAX_TOOLS = 1024
MAX_NAME_CHARACTERS = 256
"""As many as the parsers of calls read."""

_NOT_IN_NAMES = frozenset("\"'`\\<>")
"""Characters that end a name, or start an escape, in most models' formats for calls."""

ToolChoice = str | dict[str, Any]


def validate_tools(
    tools: list[dict[str, Any]] | None,
    tool_choice: ToolChoice | None,
    parallel: bool | None,
    template: ChatTemplate | None,
    rules: Rules,
) -> ValidTools | None:
    """Check tools in the shape of chat completions; return None if the model is offered no tools.

    Raises:
        InvalidParameter: naming what is wrong with a tool or the choice.
        UnsupportedParameter: if this model, or this server, does not support them.
    """
    choice, wanted = check_tool_choice(tool_choice)
    is_forced = choice in ("required", "named", "allowed_required")
    if not tools and not is_forced:
        return None
    param = "tools" if tools else "tool_choice"
    if template is None:
        raise UnsupportedParameter("this model has no chat template, so it takes no tools", param=param)
    tool_format = rules.tool_format
    if tool_format is None:
        raise UnsupportedParameter("tools are switched off on this server (--tool-call-parser none)", param=param)
    if not tools:
        raise InvalidParameter(f"tool_choice {choice!r} needs tools", param="tool_choice")
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter(f"tools may hold at most {MAX_TOOLS} tools, got {len(tools)}", param="tools")
    inputs: dict[str, InputGrammar] = {}
    functions = [_function(f"tools[{index}]", tool, inputs) for index, tool in enumerate(tools)]
    names: dict[str, None] = {}
    for index, (tool, function) in enumerate(zip(tools, functions, strict=True)):
        name = str(function["function"]["name"])
        _check_for_format(f"tools[{index}].{tool['type']}", function["function"], tool_format, rules)
        if name in names:
            raise InvalidParameter(f"tools: {name!r} is listed twice", param="tools")
        names[name] = None
    if choice == "none":
        return None
    unknown = next((name for name in wanted if name not in names), None)
    if unknown is not None:
        raise InvalidParameter(f"tool_choice names {unknown!r}, which is not one of the tools", param="tool_choice")
    for kind, name in _references(tool_choice):
        if kind != ("custom" if name in inputs else "function"):
            raise InvalidParameter(f"tool_choice: {name!r} is not a tool of type {kind!r}", param="tool_choice")
    offered = frozenset(wanted or names)
    is_parallel = parallel is not False and choice != "named"
    if wanted and choice != "named":  # other tools are not offered to the model
        functions = [tool for tool in functions if tool["function"]["name"] in wanted]
    return ValidTools(
        functions,
        offered,
        is_parallel,
        tool_format,
        is_forced,
        inputs={name: grammar for name, grammar in inputs.items() if name in offered},
    )


def check_tool_choice(choice: ToolChoice | None) -> tuple[str, tuple[str, ...]]:
    """Return the kind of choice, and the names of the tools that the choice is limited to (empty: all).

    The kind is "auto", "none", "required", "named" (the one tool must be called), "allowed_auto" or "allowed_required".

    Raises:
        InvalidParameter: for any other choice.
    """
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            return _allowed_tools(choice)
        name = _tool_name(choice)
        if name is None:
            raise InvalidParameter(
                "tool_choice: an object must name a tool of type 'function' or 'custom'", param="tool_choice"
            )
        return "named", (name,)
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", ()
    raise InvalidParameter(
        f"tool_choice must be 'auto', 'none', 'required' or an object that names a tool, got {choice[:64]!r}",
        param="tool_choice",
    )


def _allowed_tools(choice: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """OpenAI's choice among some of the tools; chat completions put its fields into a nested object."""
    allowed = choice.get("allowed_tools", choice)
    mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise InvalidParameter(
            "tool_choice: the mode of allowed_tools must be 'auto' or 'required'", param="tool_choice"
        )
    names = [_tool_name(tool) for tool in tools] if isinstance(tools, list) else []
    known = [name for name in names if name is not None]
    if not known or len(known) < len(names):
        raise InvalidParameter(
            "tool_choice: allowed_tools must list tools of type 'function' or 'custom'", param="tool_choice"
        )
    return f"allowed_{mode}", tuple(dict.fromkeys(known))


def _references(choice: ToolChoice | None) -> list[tuple[str, str]]:
    """The tools that a valid choice names, with their types."""
    if not isinstance(choice, dict):
        return []
    allowed = choice.get("allowed_tools", choice)
    tools = allowed["tools"] if choice["type"] == "allowed_tools" else [choice]
    return [(tool["type"], _tool_name(tool) or "") for tool in tools]


def _tool_name(tool: Any) -> str | None:
    """The name in a reference to a tool; chat completions nest it, responses do not."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        return None
    named = tool.get(kind, tool)
    name = named.get("name") if isinstance(named, dict) else None
    return name[:MAX_NAME_CHARACTERS] if isinstance(name, str) else None


def _function(field: str, tool: dict[str, Any], inputs: dict[str, InputGrammar]) -> dict[str, Any]:
    """The tool as a function; that of a custom tool has an input, which is added to `inputs`."""
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise InvalidParameter(f"{field}.type must be 'function' or 'custom'", param=f"{field}.type")
    field, described = f"{field}.{kind}", tool.get(kind)
    if not isinstance(described, dict):
        raise InvalidParameter(f"{field}: expected an object", param=field)
    check_function(field, described)
    if kind == "function":
        return tool
    function, inputs[described["name"]] = as_function(field, described)
    return function


def _check_for_format(field: str, function: dict[str, Any], tool_format: ToolFormat, rules: Rules) -> None:
    """Whether the model can be shown this function, and its calls can be read back."""
    check_text_size(f"{field}.description", function.get("description") or "", rules)
    name = str(function["name"])
    if _is_plain(name):
        return
    for character in dict.fromkeys(name):
        # Beyond ASCII, formats tell only letters from signs.
        tried = character if character.isascii() else "\u00e9" if character.isalnum() else "\u2022"
        if not takes_in_names(tool_format, tried):
            raise InvalidParameter(
                f"{field}.name: this model's format for calls ({tool_format.name}) has no place for {character!r} in a "
                "name",
                param=f"{field}.name",
            )


def check_function(field: str, function: dict[str, Any]) -> None:
    """Check a function's name, description, parameters and `strict`."""
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARACTERS or not _is_name(name):
        raise InvalidParameter(
            f"{field}.name must have 1 to {MAX_NAME_CHARACTERS} characters, without control characters, quotes, "
            "backslashes, '<' and '>'",
            param=f"{field}.name",
        )
    if not isinstance(function.get("description"), str | None):
        raise InvalidParameter(f"{field}.description must be a string", param=f"{field}.description")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidParameter(f"{field}.parameters: expected an object, a JSON schema", param=f"{field}.parameters")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter(f"{field}.strict: expected a boolean", param=f"{field}.strict")


def _is_name(name: str) -> bool:
    return _is_plain(name) or (name.isprintable() and bool(name.strip()) and _NOT_IN_NAMES.isdisjoint(name))


def _is_plain(name: str) -> bool:
    """Whether every format can write the name: letters, digits, `_`, `-` and `.`."""
    return name.isascii() and name.replace("_", "").replace("-", "").replace(".", "a").isalnum()
