"""Finds the shape of conversations that a chat template can show: by rendering small ones, and looking for their words.

The questions are asked in an order in which each builds on the answers before it. The first answer with which the
template shows all words of a question's conversations is taken, and the first of all if there is none.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.frontend.errors import ApiError
from penstock.frontend.text.call_style import NAME, TOOL, VALUE, CallStyle, Chat, Message, Tools, find_style
from penstock.frontend.text.shaping import Shape

Render = Callable[[Chat, Tools], str]
"""Renders messages and tools; raises ApiError if the template refuses them."""

_ROLE = "penstockrole"
"""A role that no template knows."""

_OTHER_NAME, _OTHER_VALUE = "penstock_other", "Sluicegate"
_OTHER_TOOL = {"type": "function", "function": {**TOOL["function"], "name": _OTHER_NAME}}


def _said(role: str, word: str, **fields: Any) -> Message:
    return {"role": role, "content": f"Penstock{word}", **fields}


def _call(number: int, name: str = NAME, value: str = VALUE) -> Message:
    return {"id": _id(number), "type": "function", "function": {"name": name, "arguments": {"place": value}}}


def _id(number: int) -> str:
    return f"call_{number}b7d2f04e9a6c"


def _result(number: int, word: str) -> Message:
    return _said("tool", word, tool_call_id=_id(number))


_SYSTEM, _SYSTEM_2 = _said("system", "rule"), _said("system", "norm")
_DEVELOPER = _said("developer", "wish")
_USER, _USER_2 = _said("user", "ask"), _said("user", "quest")
_ASSISTANT, _ASSISTANT_2 = _said("assistant", "reply"), _said("assistant", "word")
_CALLING: Message = {"role": "assistant", "content": None, "tool_calls": [_call(1)]}
_CALLING_TWICE: Message = {
    "role": "assistant", "content": None, "tool_calls": [_call(1), _call(2, _OTHER_NAME, _OTHER_VALUE)]
}  # fmt: skip
_SAYING, _SAYING_2 = {**_CALLING, **_said("assistant", "look")}, _said("assistant", "seek", tool_calls=[_call(2)])
_LOOP: Chat = [_USER, _CALLING, _result(1, "fact")]
_LOOP_OF_TWO: Chat = [_USER, _CALLING_TWICE, _result(1, "fact"), _result(2, "find")]
_TALKING_LOOP: Chat = [_USER, _SAYING, _result(1, "fact"), _SAYING_2, _result(2, "find")]
_TOOLS: list[dict[str, Any]] = [TOOL, _OTHER_TOOL]


@dataclass(frozen=True, slots=True)
class _Question:
    """A field of the shape, its possible values, and conversations that must be shown."""

    field: str
    answers: tuple[Any, ...]
    chats: tuple[Chat, ...]
    tools: Tools = None


_BEFORE_CALLS = (
    _Question("system", ("kept", "user"), ([_SYSTEM, _USER],)),
    _Question("systems", ("apart", "joined"), ([_SYSTEM, _SYSTEM_2, _USER],)),
    _Question("users", ("apart", "joined"), ([_USER, _USER_2],)),
    _Question("assistants", ("apart", "joined"), ([_USER, _ASSISTANT, _ASSISTANT_2, _USER_2],)),
    _Question("empty_answer", ("kept", "left out"), ([_USER, {"role": "assistant", "content": ""}, _USER_2],)),
    _Question("opening", (None, "", "."), ([_ASSISTANT, _USER], [_SYSTEM, _ASSISTANT, _USER])),
    _Question(
        "later_system", ("kept", "user"),
        ([_SYSTEM, _USER, _ASSISTANT, _SYSTEM_2, _USER_2], [_USER, _SYSTEM], [_USER, _SYSTEM, _ASSISTANT, _USER_2]),
    ),
    _Question("alone", ("kept", "user"), ([_SYSTEM],)),
    _Question("ending", (None, "", "."), ([_USER, _ASSISTANT],)),
)  # fmt: skip
_WITH_CALLS = (
    _Question("result", ("kept", "user"), (_LOOP,), _TOOLS),
    _Question("lone_result", ("kept", "user"), ([_USER, _result(1, "fact"), _USER_2], [_result(1, "fact"), _USER])),
    _Question("after_result", ("kept", "assistant", "result"), ([*_LOOP, _USER_2], [*_LOOP_OF_TWO, _USER_2]), _TOOLS),
    _Question("system_in_loop", ("kept", "question"), ([_SYSTEM, *_LOOP],), _TOOLS),
    _Question(
        "beside_calls",
        ("kept", "answer", "last"),
        (_TALKING_LOOP, [*_TALKING_LOOP, _ASSISTANT, _USER_2], [*_TALKING_LOOP, _USER_2]),
        _TOOLS,
    ),
    _Question("system_after_result", ("kept", "user"), ([*_LOOP, _SYSTEM], [*_LOOP, _SYSTEM, _ASSISTANT]), _TOOLS),
)


def find_shape(render: Render) -> Shape:
    """The shape for the template that `render` renders with."""
    return _Finder(render).shape


class _Finder:
    def __init__(self, render: Render) -> None:
        self._render = render
        self.shape = Shape()
        for question in _BEFORE_CALLS:
            self._answer(question)
        self._find_developer()
        self._find_tools()
        self._find_calls()
        for question in _WITH_CALLS:
            self._answer(question)

    def _answer(self, question: _Question) -> None:
        for answer in question.answers:
            tried = replace(self.shape, **{question.field: answer})
            if all(self._shows(tried, chat, question.tools) for chat in question.chats):
                self.shape = tried
                return

    def _text(self, shape: Shape, chat: Chat, tools: Tools = None) -> str:
        """The rendered conversation; empty if the template refuses it."""
        try:
            return self._render(*shape.apply(chat, tools))
        except ApiError:
            return ""

    def _shows(self, shape: Shape, chat: Chat, tools: Tools = None) -> bool:
        text = self._text(shape, chat, tools)
        return all(word in text for word in _words(chat))

    def _find_developer(self) -> None:
        """Developer messages keep their role only where the template treats it unlike a role that it does not know."""
        shows = all(self._shows(self.shape, chat) for chat in ([_DEVELOPER, _USER], [_SYSTEM, _DEVELOPER, _USER]))
        unknown = self._text(self.shape, [{**_DEVELOPER, "role": _ROLE}, _USER])
        if not shows or unknown.replace(_ROLE, "developer") == self._text(self.shape, [_DEVELOPER, _USER]):
            self.shape = replace(self.shape, developer="system")

    def _find_tools(self) -> None:
        """Whether the template shows tools, and which optional fields it needs."""
        complete = [TOOL]
        if NAME not in self._text(self.shape, [_USER], complete) and NAME not in self._text(
            self.shape, [_SYSTEM, _USER], complete
        ):
            self.shape = replace(self.shape, tools="prompted")
            return
        self._join_systems(complete)
        function = TOOL["function"]
        optional = {
            "descriptions": [_without(function, "description"), _with(place={"type": "string"}, at={"type": "array"})],
            "parameters": [
                _without(function, "parameters"),
                {**function, "parameters": {}},
                {**function, "parameters": {"type": "object"}},
                {**function, "parameters": _without(function["parameters"], "required")},
            ],
            "types": [_with(place=part) for part in _PARTS],
        }
        for field, functions in optional.items():
            if not all(self._shows_tool(function) for function in functions):
                fields = replace(self.shape.tool_fields, **{field: True})
                self.shape = replace(self.shape, tool_fields=fields)

    def _join_systems(self, tools: Tools) -> None:
        """Some templates write the tools into each system message: then there must be only one."""
        once = self._text(self.shape, [_SYSTEM, _USER], tools).count(NAME)
        changes: tuple[tuple[dict[str, Any], Chat], ...] = (
            ({"systems": "joined"}, [_SYSTEM, _SYSTEM_2, _USER]),
            ({"later_system": "user"}, [_SYSTEM, _USER, _ASSISTANT, _SYSTEM_2, _USER_2]),
        )
        for change, chat in changes:
            if self._text(self.shape, chat, tools).count(NAME) > once:
                self.shape = replace(self.shape, **change)

    def _shows_tool(self, function: dict[str, Any]) -> bool:
        text = self._text(self.shape, [_USER], [{"type": "function", "function": function}])
        return NAME in text and ("None" not in text or "None" in self._text(self.shape, [_USER], [TOOL]))

    def _find_calls(self) -> None:
        """How past calls are passed: with which ids, together or apart, and in which style."""
        is_prompted, tools = self.shape.tools == "prompted", None if self.shape.tools == "prompted" else _TOOLS
        style = find_style(self._in_style)
        if is_prompted and (style is None or style.calls_as == "content"):
            self.shape = replace(self.shape, calls="prompted")
        else:
            self.shape = replace(self.shape, style=style or CallStyle())
        changes: tuple[dict[str, Any], ...] = (
            {}, {"ids": "short"}, {"result": "user"}, {"ids": "short", "result": "user"}
        )  # fmt: skip
        shapes = [replace(self.shape, **change) for change in changes]
        self.shape = next((shape for shape in shapes if self._shows(shape, _LOOP, tools)), self.shape)
        if self.shape.style.calls_as == "content" or self.shape.calls == "prompted":
            return
        if not self._shows(self.shape, _LOOP_OF_TWO, tools):
            tried = replace(self.shape, calls="apart")
            self.shape = tried if self._shows(tried, _LOOP_OF_TWO, tools) else self.shape

    def _in_style(self, chat: Chat, style: CallStyle) -> str:
        tools = None if self.shape.tools == "prompted" else [TOOL]
        return self._render(*replace(self.shape, style=style).apply(chat, tools))


_PARTS: tuple[dict[str, Any], ...] = (
    {"description": "A place."},
    {},
    {"type": ["string", "null"], "description": "A place."},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "A place."},
    {"enum": ["a", 1], "description": "A place."},
    {"type": "array", "description": "Places."},
    {"type": "array", "items": {"type": ["string", "null"]}, "description": "Places."},
    {"type": "object", "description": "More.", "properties": {"inner": {"type": ["string", "null"]}}},
)
"""Schemas of a property that not every template can show."""


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _with(**properties: Any) -> dict[str, Any]:
    function = TOOL["function"]
    return {**function, "parameters": {**function["parameters"], "properties": properties}}


def _words(chat: Chat) -> list[str]:
    """What must be in the text of a conversation."""
    words = [message["content"] for message in chat if message.get("content")]
    for call in (call for message in chat for call in message.get("tool_calls") or ()):
        words += [call["function"]["name"], call["function"]["arguments"]["place"]]
    return words
