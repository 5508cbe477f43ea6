"""What Anthropic's own servers leave in a conversation: calls of their tools, with results, and notes to themselves.

A call whose result has a text is shown to the model like a call of the client's tools. The rest is left out.
"""

from collections.abc import Iterable
from typing import Any

from penstock.parts.anthropic.frontend.schema import Block

CALLS = ("server_tool_use", "mcp_tool_use")

LEFT_OUT = ("container_upload", "mcp_tool_listing", "tool_addition", "tool_removal", "fallback")
"""Types of blocks with nothing that the model could be shown."""

_TEXTS = ("title", "url", "text", "stdout", "stderr", "data", "content", "source", "lines", "tool_references")
"""Where results have texts, or lists and objects with more of them."""

_MAX_DEPTH = 8


def is_result(kind: str) -> bool:
    """Whether a block has the result of a server's tool."""
    return kind.endswith("_tool_result")


def results_of(messages: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The readable results in a conversation, by the ids of their calls."""
    found: dict[str, str] = {}
    for message in messages:
        content = message.get("content")
        for block in content if isinstance(content, list) else ():
            kind, call_id = (block.get("type"), block.get("tool_use_id")) if isinstance(block, dict) else ("", "")
            if not (isinstance(kind, str) and is_result(kind) and isinstance(call_id, str)):
                continue
            if text := _readable(block.get("content"), 0):
                found[call_id] = f"Error: {text}" if block.get("is_error") is True else text
    return found


def call_of(block: Block) -> dict[str, Any]:
    """A call in the shape of chats."""
    given = block.get("input")
    function = {"name": str(block.get("name")), "arguments": given if isinstance(given, dict) else {}}
    return {"id": block["id"], "type": "function", "function": function}


def _readable(given: Any, depth: int) -> str:
    """All text in a result, a line for each piece; what only Anthropic can decode is none."""
    if isinstance(given, str):
        return given.removesuffix("\n")
    if depth > _MAX_DEPTH:
        return ""
    if isinstance(given, list):
        return "\n".join(filter(None, (_readable(each, depth + 1) for each in given)))
    if not isinstance(given, dict) or given.get("type") in ("base64", "image"):
        return ""
    texts = [_readable(given[name], depth + 1) for name in _TEXTS if name in given]
    if given.get("type") == "tool_reference":
        texts.append(f"The tool {given.get('tool_name')} is available.")
    if isinstance(given.get("error_code"), str):
        texts.append(f"Error: {given['error_code']}")
    if isinstance(given.get("return_code"), int):
        texts.append(f"exit code: {given['return_code']}")
    return "\n".join(filter(None, texts))
