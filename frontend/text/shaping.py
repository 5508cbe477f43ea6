"""Brings a conversation into a shape in which its chat template can show all of it.

Clients mix roles as they like: several system messages, developer messages, system messages in the middle, two users
in a row, several calls in one message. Each template shows some of that, refuses some, and drops some without a word.
A `Shape` says what is to be changed for one template; `probing.py` finds it by rendering. Nothing that the template
shows as it was sent is changed.

A system message that cannot stay in the middle becomes text of the user's turn next to it. It never moves to the front:
agents add one in nearly every turn, and the prompt's beginning must not change for the prefix cache.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.frontend.text.call_style import REASONING_FIELDS, CallStyle, Chat, Message, Tools
from penstock.frontend.text.tool_prompt import ToolFields, generic_calls, generic_result, generic_tool_prompt

_ID_LENGTH = 9
_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a template needs changed. The defaults change nothing."""

    developer: Literal["kept", "system"] = "kept"
    """Whether developer messages, OpenAI's newer name, become system messages."""
    system: Literal["kept", "user"] = "kept"
    """Whether system messages at the beginning become text of the first user's message."""
    system_in_loop: Literal["kept", "question"] = "kept"
    """Whether those at the beginning become text of the last question unless that is the last message: some templates
    show them with it alone."""
    systems: Literal["apart", "joined"] = "apart"
    """Whether those at the beginning become one."""
    later_system: Literal["kept", "user"] = "kept"
    system_after_result: Literal["kept", "user"] = "kept"
    users: Literal["apart", "joined"] = "apart"
    assistants: Literal["apart", "joined"] = "apart"
    opening: str | None = None
    """The text of a user's message that is put before an assistant's, if that would be the first; None: nothing."""
    alone: Literal["kept", "user"] = "kept"
    """Whether an empty user's message follows where there is none."""
    ending: str | None = None
    """The text of a user's message that follows an assistant's, if that would be the last; None: nothing."""
    ids: Literal["kept", "short"] = "kept"
    """Whether ids of calls must have nine letters and digits."""
    calls: Literal["together", "apart", "prompted"] = "together"
    """Whether each call of a message gets a message of its own, followed by its result; or all are written into the
    content, in the form of the prompt that describes tools."""
    result: Literal["kept", "user"] = "kept"
    """Whether results become users' messages."""
    lone_result: Literal["kept", "user"] = "kept"
    """Whether those without a call before them do."""
    after_result: Literal["kept", "assistant", "result"] = "kept"
    """What comes between a result and a user's text: nothing, an empty answer, or the text is put into the result."""
    empty_answer: Literal["kept", "left out"] = "kept"
    """What becomes of an assistant's message with neither text nor calls."""
    beside_calls: Literal["kept", "answer", "last"] = "kept"
    """Where the text beside calls goes: it stays; or it becomes the beginning of the turn's answer once there is one;
    or of the last text of the turn, whether that has calls or not."""
    tools: Literal["shown", "prompted"] = "shown"
    """Whether the template shows tools, or they are described in a system message."""
    tool_fields: ToolFields = field(default_factory=ToolFields)
    style: CallStyle = field(default_factory=CallStyle)

    def apply(self, messages: Chat, tools: Tools, example: str = "") -> tuple[Chat, Tools]:
        """The conversation in this shape. What was given is not changed.

        `example` is a call in the model's own format, for the prompt about tools if the template shows calls alone.
        """
        messages = _with_ids(messages, is_short=self.ids == "short")
        if self.calls == "prompted":
            messages = [_as_content(message) for message in messages]
        if self.tools == "prompted" and tools:
            prompt = generic_tool_prompt(tools, "" if self.calls == "prompted" else example)
            messages, tools = [{"role": "system", "content": prompt}, *messages], None
        made = _Conversation(self)
        for message in messages:
            made.take(message)
        chat = made.finish()
        if self.system_in_loop == "question":
            chat = _with_system_in_question(chat)
        if self.beside_calls != "kept":
            chat = _with_texts_moved(chat, only_to_answers=self.beside_calls == "answer")
        if self.calls == "apart" and self.style.calls_as == "calls":
            chat = _one_call_each(chat)
        styled: Chat = []
        for message in chat:
            is_plain = message["role"] != "assistant" and None not in message.values()
            styled += [message] if is_plain else self.style.apply(message)
        return styled, tools and self.tool_fields.fill(tools)


class _Conversation:
    """The messages so far."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._chat: Chat = []
        self._texts: list[str] = []  # more text of the last message
        self._is_leading = True  # there were only system messages
        self._is_aside = False  # the last message was a system message
        self._has_calls = False
        self._joined = {
            "system": shape.systems == "joined",
            "user": shape.users == "joined",
            "assistant": shape.assistants == "joined",
        }

    @property
    def _last_role(self) -> str:
        return str(self._chat[-1]["role"]) if self._chat else ""

    def take(self, message: Message) -> None:
        """Add a message of the client."""
        shape, role = self._shape, message["role"]
        if role == "developer" and shape.developer == "system":
            role = "system"
        if role == "system":
            self._take_system({**message, "role": role})
        elif role == "tool" and (shape.result == "user" or (shape.lone_result == "user" and not self._has_calls)):
            self._add({"role": "user", "content": _as_result(message.get("content"))})
        elif role == "assistant":
            if shape.empty_answer == "left out" and not message.get("content") and not message.get("tool_calls"):
                return
            if self._last_role in ("", "system", "developer") and shape.opening is not None:
                self._add({"role": "user", "content": shape.opening})
            self._add(message)
            self._has_calls |= bool(message.get("tool_calls"))
        else:
            self._add(message)

    def finish(self) -> Chat:
        """All messages."""
        if self._shape.ending is not None and self._last_role == "assistant":
            self._add({"role": "user", "content": self._shape.ending})
        if self._shape.alone == "user" and not any(message["role"] == "user" for message in self._chat):
            self._add({"role": "user", "content": ""})
        self._flush()
        return self._chat

    def _take_system(self, message: Message) -> None:
        shape = self._shape
        if self._is_leading:
            is_kept = shape.system == "kept"
        else:
            is_kept = shape.later_system == "kept"
            is_kept &= self._last_role != "tool" or shape.system_after_result == "kept"
        if is_kept:
            self._add(message)
        else:
            self._add({"role": "user", "content": message.get("content")}, is_aside=True)

    def _add(self, message: Message, *, is_aside: bool = False) -> None:
        role = message["role"]
        if role == "user" and self._last_role == "tool" and self._shape.after_result != "kept":
            if self._shape.after_result == "result":
                self._join({"role": "tool", "content": message.get("content")})
                return
            self._append({"role": "assistant", "content": ""})
        is_joined = self._joined.get(role, False) or (role == "user" and (is_aside or self._is_aside))
        if is_joined and role == self._last_role:
            self._join(message)
        else:
            self._append(message)
        self._is_aside = is_aside
        self._is_leading &= is_aside or role in ("system", "developer")

    def _append(self, message: Message) -> None:
        self._flush()
        self._chat.append(message)

    def _join(self, message: Message) -> None:
        """Append a message to the last one. Texts are joined at its end: a turn may be thousands of messages."""
        last, content = self._chat[-1], message.get("content")
        joined = {**last}
        if isinstance(content, str) and isinstance(last.get("content"), str | None):
            self._texts.append(content)
        else:
            self._flush()
            joined["content"] = _together(self._chat[-1].get("content"), content)
        for name, value in message.items():
            if name == "tool_calls" and value:
                joined[name] = [*(last.get(name) or ()), *value]
            elif name in REASONING_FIELDS and isinstance(value, str):
                joined[name] = _SEPARATOR.join(filter(None, (last.get(name), value)))
        self._chat[-1] = joined

    def _flush(self) -> None:
        if self._texts:
            last = self._chat[-1]
            texts = filter(None, (last.get("content"), *self._texts))
            self._chat[-1] = {**last, "content": _SEPARATOR.join(texts)}
            self._texts = []


def _together(first: Any, second: Any) -> Any:
    """Two contents as one: a text, or a list of parts."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{_SEPARATOR}{second}"
    return [*_parts(first), {"type": "text", "text": _SEPARATOR}, *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_result(content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": "<tool_response>\n"}, *content, {"type": "text", "text": "\n</tool_response>"}]
    return generic_result(content or "")


def _as_content(message: Message) -> Message:
    """An assistant's message with its calls written into its content."""
    if not message.get("tool_calls"):
        return message
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    written = generic_calls(message["tool_calls"])
    return {**kept, "content": "\n".join(filter(None, (message.get("content"), written)))}


def _with_ids(messages: Chat, *, is_short: bool) -> Chat:
    """The messages with an id in every call and result, and the tool's name in every result."""
    if not any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        return messages
    names: dict[str, str] = {}
    waiting: dict[str, None] = {}  # ids of calls without a result
    made: Chat = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [_with_id(call, len(names) + at) for at, call in enumerate(message["tool_calls"])]
            ids = [str(call["id"]) for call in calls]
            names |= {call_id: str(_function(call).get("name")) for call_id, call in zip(ids, calls, strict=True)}
            waiting |= dict.fromkeys(ids)
            if is_short:
                calls = [{**call, "id": _short(str(call["id"]))} for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id") or next(iter(waiting), "")
            waiting.pop(call_id, None)
            name = message.get("name") or names.get(call_id)
            message = {**message, "tool_call_id": _short(call_id) if is_short else call_id}
            if name:
                message["name"] = name
        made.append(message)
    return made


def _function(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def _with_id(call: Any, number: int) -> dict[str, Any]:
    """The call with an id and a type."""
    return {**call, "id": call.get("id") or f"call{number:05d}", "type": call.get("type") or "function"}


def _short(call_id: str) -> str:
    """An id of nine letters and digits; one that has them already stays."""
    if len(call_id) == _ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_ID_LENGTH]


def _with_system_in_question(chat: Chat) -> Chat:
    """The first message, if it is the system's, at the beginning of the last question, unless that comes last."""
    question = next((at for at in reversed(range(len(chat))) if chat[at]["role"] == "user"), 0)
    if not chat or chat[0]["role"] != "system" or question in (0, len(chat) - 1):
        return chat
    asked = {**chat[question], "content": _together(chat[0].get("content"), chat[question].get("content"))}
    return [*chat[1:question], asked, *chat[question + 1 :]]


def _with_texts_moved(chat: Chat, *, only_to_answers: bool) -> Chat:
    """The texts beside calls at the beginning of the last text of their turn; or only of its answer, if it has one."""
    made = list(chat)
    beside: list[int] = []  # messages of this turn with calls and text
    target = -1  # its last message with a text, or without calls
    for at, message in enumerate([*chat, {"role": "user"}]):
        if message["role"] == "user":
            moved = [index for index in beside if index < target]
            if moved and not (only_to_answers and made[target].get("tool_calls")):
                texts = [made[index]["content"] for index in moved]
                last = made[target]
                made[target] = {**last, "content": _SEPARATOR.join(filter(None, (*texts, last.get("content"))))}
                for index in moved:
                    made[index] = {**made[index], "content": None}
            beside, target = [], -1
        elif message["role"] == "assistant" and isinstance(message.get("content"), str | None):
            has_calls, has_text = bool(message.get("tool_calls")), bool(message.get("content"))
            if has_calls and has_text:
                beside.append(at)
            if has_text or not has_calls:
                target = at
    return made


def _one_call_each(chat: Chat) -> Chat:
    """Each call in a message of its own, followed by its result; results keep their order."""
    made: Chat = []
    at = 0
    while at < len(chat):
        message, calls = chat[at], chat[at].get("tool_calls") or ()
        at += 1
        if len(calls) < 2:
            made.append(message)
            continue
        results = []
        while at < len(chat) and chat[at]["role"] == "tool":
            results.append(chat[at])
            at += 1
        left = list(calls)
        first = message
        for result in results:
            call = next((each for each in left if each["id"] == result.get("tool_call_id")), None)
            if call is not None:
                left.remove(call)
                made.append({**first, "tool_calls": [call]})
                first = {"role": "assistant", "content": None}
            made.append(result)
        for call in left:
            made.append({**first, "tool_calls": [call]})
            first = {"role": "assistant", "content": None}
    return made
