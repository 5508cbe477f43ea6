"""What a chat template expects of an assistant message that calls tools; found by trying, once for each template.

Clients send such a message back with `content: null` and its arguments as JSON text. Qwen3's template looks for
`</think>` in the content, so it must be a text; DeepSeek's writes the calls only where the content is none. Most
templates write the arguments with `tojson`, some put the text as it is between two marks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

import msgspec

from penstock.frontend.errors import ApiError

Chat = list[dict[str, Any]]
NoContent = Literal["empty", "none", "absent"]
Arguments = Literal["object", "text"]

_NAME, _VALUE = "penstock_probe", "Waterwheel"
_ARGUMENTS = {"place": _VALUE}
_AS_PYTHON = str(_ARGUMENTS)[:8]  # an object that a template writes without `tojson`
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How to hand calls to a template."""

    no_content: NoContent = "empty"
    arguments: Arguments = "object"

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the template wants it; None values are dropped, but for a content that must be none."""
        given = {name: value for name, value in message.items() if value is not None}
        if given.get("role") != "assistant":
            return given
        if "content" not in given and not (given.get("tool_calls") and self.no_content != "empty"):
            given["content"] = ""
        elif "content" not in given and self.no_content == "none":
            given["content"] = None
        if self.arguments == "text" and given.get("tool_calls"):
            given["tool_calls"] = [_with_text(call) for call in given["tool_calls"]]
        return given


_STYLES = tuple(
    CallStyle(no_content, arguments) for arguments, no_content in product(get_args(Arguments), get_args(NoContent))
)


def find_style(render: Callable[[Chat, list[dict[str, Any]]], str]) -> CallStyle:
    """The first style in which the template shows a call whole; the usual one if there is none such.

    `render` writes messages and tools as the template does and raises ApiError where it refuses them.
    """
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    chat: Chat = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": _NAME, "content": "Here."},
    ]
    for style in _STYLES:
        try:
            text = render([style.apply(message) for message in chat], [_TOOL])
        except ApiError:
            continue
        if _shows_call(text, style):
            return style
    return CallStyle()


def _shows_call(text: str, style: CallStyle) -> bool:
    if _VALUE not in text or _AS_PYTHON in text:
        return False
    text_twice = '{\\"place\\"'  # JSON text that the template has put through `tojson` again
    return style.arguments == "object" or text_twice not in text


def _with_text(call: Any) -> Any:
    """The call with its arguments as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str | None):
        return call
    return {**call, "function": {**function, "arguments": msgspec.json.encode(function["arguments"]).decode()}}
