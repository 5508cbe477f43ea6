"""How past calls are passed to a template: found by trying, once.

Clients send such a message back with `content: null` and its arguments as JSON text. Qwen3's template looks for
`</think>` in the content, so it must be a text; DeepSeek's writes the calls only if the content is none. Most
templates write the arguments with `tojson`; some put the text unchanged between two marks. gpt-oss's refuses calls
with both reasoning and content. Phi-4-mini's writes no calls: they become content, or the model would call again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, get_args

import msgspec

from penstock.frontend.errors import ApiError
from penstock.frontend.text.sandbox import tojson

Message = dict[str, Any]
Chat = list[Message]
Tools = list[dict[str, Any]] | None
NoContent = Literal["empty", "none", "absent"]
Arguments = Literal["object", "text"]
CallsAs = Literal["calls", "content"]
Beside = Literal["kept", "joined", "apart", "dropped"]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How calls are passed to a template."""

    no_content: NoContent = "empty"
    arguments: Arguments = "object"
    calls_as: CallsAs = "calls"
    content: Beside = "kept"
    """What becomes of content beside calls: it is kept, appended to the reasoning if there is any, put into a message
    of its own before the calls, or left out."""

    def apply(self, message: Message) -> Chat:
        """The message as the template wants it; None values are dropped, except for a content that must be none."""
        given = {name: value for name, value in message.items() if value is not None}
        if given.get("role") != "assistant":
            return [given]
        before: Chat = []
        if not given.get("tool_calls"):
            given.pop("tool_calls", None)  # templates check whether the list exists
        elif self.calls_as == "content":
            given["content"] = "\n".join(
                (*filter(None, [given.get("content")]), calls_as_text(given.pop("tool_calls")))
            )
        elif self.content == "dropped":
            given.pop("content", None)
        elif self.content == "apart" and given.get("content"):
            before.append({"role": "assistant", "content": given.pop("content")})
        elif self.content == "joined" and (name := next((n for n in REASONING_FIELDS if given.get(n)), "")):
            given[name] = "\n\n".join(filter(None, (given[name], given.pop("content", None))))
        if not given.get("content") and given.get("tool_calls") and self.no_content != "empty":
            given.pop("content", None)
            if self.no_content == "none":
                given["content"] = None
        elif "content" not in given:
            given["content"] = ""
        if self.arguments == "text" and given.get("tool_calls"):
            given["tool_calls"] = [_with_text(call) for call in given["tool_calls"]]
        return [*before, with_reasoning_names(given)]


def with_reasoning_names(message: Message) -> Message:
    """Offer a message's reasoning under all names that templates read it by (as transformers does)."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {**dict.fromkeys(REASONING_FIELDS, reasoning), **message, "reasoning_content": reasoning}


NAME, VALUE = "penstock_probe", "Waterwheel"
_ARGUMENTS = {"place": VALUE}
_AS_PYTHON = str(_ARGUMENTS)[:8]  # an object that a template writes without `tojson`
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "A place."}},
            "required": ["place"],
        },
    },
}


_STYLES = (
    *(CallStyle(no_content, form) for form, no_content in product(get_args(Arguments), get_args(NoContent))),
    CallStyle(calls_as="content"),
)


def find_style(render: Callable[[Chat, CallStyle], str]) -> CallStyle | None:
    """The first style in which the template shows a complete call; None if there is none.

    `render` renders messages in a style, with a tool, and raises ApiError if the template refuses them.
    """
    call = {"id": "abcdefghi", "type": "function", "function": {"name": NAME, "arguments": _ARGUMENTS}}

    def shows(style: CallStyle, *words: str, **said: Any) -> bool:
        chat: Chat = [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": None, "tool_calls": [call], **said},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": NAME, "content": "Here."},
        ]
        try:
            text = render(chat, style)
        except ApiError:
            return False
        return _shows_call(text, style) and all(word in text for word in words)

    style = next((style for style in _STYLES if shows(style)), None)
    if style is None:
        return None
    for content in get_args(Beside):
        tried = replace(style, content=content)
        words = () if content == "dropped" else ("I look.",)
        if shows(tried, *words, content="I look.") and shows(tried, *words, content="I look.", reasoning="Hm."):
            return tried
    return style


def _shows_call(text: str, style: CallStyle) -> bool:
    if VALUE not in text or _AS_PYTHON in text:
        return False
    text_twice = '{\\"place\\"'  # JSON text that the template has passed through `tojson` again
    return style.arguments == "object" or text_twice not in text


def calls_as_text(calls: list[Any]) -> str:
    """Past calls as a JSON array of names and arguments."""
    return tojson(functions_of(calls))


def functions_of(calls: list[Any]) -> list[dict[str, Any]]:
    """The names and arguments of past calls."""
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    return [
        {"name": function.get("name"), "arguments": function.get("arguments")}
        for function in functions
        if isinstance(function, dict)
    ]


def _with_text(call: Any) -> Any:
    """The call with its arguments as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str | None):
        return call
    return {**call, "function": {**function, "arguments": msgspec.json.encode(function["arguments"]).decode()}}
