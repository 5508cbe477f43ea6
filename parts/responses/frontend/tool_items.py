"""Items of tools in a conversation, in the shape of chats: calls, and their results.

Agents and OpenAI's own tools leave many kinds of items behind. Those with a text that the model needs are shown as
calls of a function and its result, whoever ran it. The others are left out, and the client is told.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.parsing.custom_input import arguments_of

Item = dict[str, Any]

Content = str | list[Any]
"""A text or, where there are images or files, parts of a chat's message."""

LEFT_OUT = {
    "web_search_call": "it holds no results",
    "image_generation_call": "models cannot read what they said as an image",
    "mcp_list_tools": "tools are offered by each request",
    "mcp_approval_request": "it holds no text of the conversation",
    "mcp_approval_response": "it holds no text of the conversation",
    "additional_tools": "tools are offered by each request",
    "compaction_trigger": "use POST /v1/responses/compact",
    "ghost_snapshot": "it holds no text of the conversation",
}
"""Types that the model is not shown, and why."""

ID_PREFIXES = {
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "computer_call": "cu",
    "computer_call_output": "cuo",
    "web_search_call": "ws",
    "file_search_call": "fs",
    "code_interpreter_call": "ci",
    "image_generation_call": "ig",
    "mcp_call": "mcp",
}
"""How new ids of items begin; those of other types begin with `item`, and those of messages with `msg`."""


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A past call."""

    call_id: str
    name: str
    arguments: Any
    """An object, or JSON text."""

    def in_chat(self) -> dict[str, Any]:
        """The call in the shape of chats."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ShownResult:
    """The result of a past call."""

    call_id: str
    content: Content

    def in_chat(self) -> dict[str, Any]:
        """The result in the shape of chats."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.content}


_NAMED = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")

Shown = list[ShownCall | ShownResult]


def string(field: str, item: Item, key: str) -> str:
    """A field that must be a text.

    Raises:
        InvalidParameter: it is none.
    """
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidParameter(f"{field}.{key}: expected a text", param=f"{field}.{key}")
    return value


def shown_tool(field: str, item: Item, read_content: Callable[[str, Any], Content]) -> Shown:
    """What an item of one of `TOOL_TYPES` shows; `read_content` reads an output's text or parts.

    Raises:
        InvalidParameter: naming the field that is wrong.
    """
    kind: str = item["type"]
    if kind in _OUTPUTS:
        return [ShownResult(_call_id(field, item), read_content(f"{field}.output", _OUTPUTS[kind](field, item)))]
    return _CALLS[kind](field, item)


def _call_id(field: str, item: Item) -> str:
    """The call's id. Items of OpenAI's own tools may have only one of their own, and agents leave that out."""
    if item["type"] in _NAMED:
        return string(field, item, "call_id")
    return string(field, {"call_id": call_id_of(item)}, "call_id")


def call_id_of(item: Item) -> Any:
    """What is taken for the call's id: always the same for the same item, so that prompts stay as they were."""
    given = item.get("call_id") or item.get("id")
    if given is None and item["type"] in _CALLS:
        return f"call_{hashlib.sha256(_json(item).encode()).hexdigest()[:24]}"
    return given


def _object(field: str, item: Item, key: str) -> dict[str, Any]:
    value = item.get(key)
    if not isinstance(value, dict):
        raise InvalidParameter(f"{field}.{key}: expected an object", param=f"{field}.{key}")
    return value


def _given(fields: dict[str, Any], *but: str) -> dict[str, Any]:
    """The fields that say something."""
    return {name: value for name, value in fields.items() if value not in (None, [], {}) and name not in but}


def _objects(given: Any) -> list[dict[str, Any]]:
    return [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []


# --- calls whose results are items of their own --------------------------------------------------


def _function(field: str, item: Item) -> Shown:
    arguments = string(field, item, "arguments")
    return [ShownCall(_call_id(field, item), string(field, item, "name"), arguments)]


def _custom(field: str, item: Item) -> Shown:
    arguments = arguments_of(string(field, item, "input"))
    return [ShownCall(_call_id(field, item), string(field, item, "name"), arguments)]


def _local_shell(field: str, item: Item) -> Shown:
    return [ShownCall(_call_id(field, item), "local_shell", _given(_object(field, item, "action"), "type"))]


def _shell(field: str, item: Item) -> Shown:
    return [ShownCall(_call_id(field, item), "shell", _given(_object(field, item, "action"), "type"))]


def _apply_patch(field: str, item: Item) -> Shown:
    return [ShownCall(_call_id(field, item), "apply_patch", _given(_object(field, item, "operation")))]


def _computer(field: str, item: Item) -> Shown:
    arguments = _given({"action": item.get("action"), "actions": item.get("actions")})
    if not arguments:
        raise InvalidParameter(f"{field}.action: expected an object", param=f"{field}.action")
    return [ShownCall(_call_id(field, item), "computer", arguments)]


def _tool_search(field: str, item: Item) -> Shown:
    arguments = item.get("arguments")
    return [ShownCall(_call_id(field, item), "tool_search", arguments if isinstance(arguments, dict | str) else {})]


def _program(field: str, item: Item) -> Shown:
    return [ShownCall(_call_id(field, item), "program", {"code": string(field, item, "code")})]


# --- calls with their results -----------------------------------------------------------------


def _mcp(field: str, item: Item) -> Shown:
    call_id, error = _call_id(field, item), item.get("error")
    call = ShownCall(call_id, string(field, item, "name"), string(field, item, "arguments"))
    result = item.get("output")
    if error is not None:
        result = f"Error: {error if isinstance(error, str) else _json(error)}"
    return [call, ShownResult(call_id, result if isinstance(result, str) else "")]


def _code_interpreter(field: str, item: Item) -> Shown:
    call_id, code = _call_id(field, item), item.get("code")
    outputs = _objects(item.get("outputs"))
    texts = [each["logs"] if isinstance(each.get("logs"), str) else "[an image]" for each in outputs]
    call = ShownCall(call_id, "code_interpreter", {"code": code if isinstance(code, str) else ""})
    return [call, ShownResult(call_id, "\n".join(texts))]


def _file_search(field: str, item: Item) -> Shown:
    """Nothing if the results are not there, as is usual: the answer behind them is."""
    results = _objects(item.get("results"))
    if not results:
        return []
    call_id = _call_id(field, item)
    texts = [
        "\n".join(str(each[name]) for name in ("filename", "text") if isinstance(each.get(name), str))
        for each in results
    ]
    call = ShownCall(call_id, "file_search", _given({"queries": item.get("queries")}))
    return [call, ShownResult(call_id, "\n\n".join(texts))]


_CALLS: dict[str, Callable[[str, Item], Shown]] = {
    "function_call": _function,
    "custom_tool_call": _custom,
    "local_shell_call": _local_shell,
    "shell_call": _shell,
    "apply_patch_call": _apply_patch,
    "computer_call": _computer,
    "tool_search_call": _tool_search,
    "program": _program,
    "mcp_call": _mcp,
    "code_interpreter_call": _code_interpreter,
    "file_search_call": _file_search,
}


# --- results --------------------------------------------------------------------------------


def _output(field: str, item: Item) -> Any:
    return item.get("output")


def _shell_output(field: str, item: Item) -> Any:
    """What each command wrote, and how it ended."""
    given = item.get("output")
    if isinstance(given, str):
        return given
    texts = []
    for part in _objects(given):
        outcome = part.get("outcome")
        outcome = outcome if isinstance(outcome, dict) else {}
        ending = "it took too long and was ended" if outcome.get("type") == "timeout" else ""
        if outcome.get("exit_code") is not None:
            ending = f"exit code: {outcome['exit_code']}"
        texts += [str(part.get("stdout") or ""), str(part.get("stderr") or ""), ending]
    return "\n".join(text.removesuffix("\n") for text in texts if text)


def _patch_output(field: str, item: Item) -> Any:
    said, status = item.get("output"), item.get("status")
    return said if isinstance(said, str) and said else str(status or "")


def _screenshot(field: str, item: Item) -> Any:
    given = item.get("output")
    address = given.get("image_url") if isinstance(given, dict) else None
    return [{"type": "input_image", "image_url": address} if isinstance(address, str) else {"type": "input_file"}]


def _found_tools(field: str, item: Item) -> Any:
    return _json(item.get("tools") or [])


def _program_result(field: str, item: Item) -> Any:
    return item.get("result")


_OUTPUTS: dict[str, Callable[[str, Item], Any]] = {
    "function_call_output": _output,
    "custom_tool_call_output": _output,
    "local_shell_call_output": _output,
    "shell_call_output": _shell_output,
    "apply_patch_call_output": _patch_output,
    "computer_call_output": _screenshot,
    "tool_search_output": _found_tools,
    "program_output": _program_result,
}

TOOL_TYPES = (*_CALLS, *_OUTPUTS)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
