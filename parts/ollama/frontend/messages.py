"""Turns Ollama's messages (tool names instead of ids, arguments as objects, images beside texts) into a chat's."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.image_source import ImageLimits
from penstock.frontend.validation.chat import MAX_MESSAGES
from penstock.parts.ollama.frontend.options import image_parts

Message = dict[str, Any]


@dataclass(slots=True)
class _Call:
    call_id: str
    name: str
    is_answered: bool = False


@dataclass(slots=True)
class _Calls:
    """The calls without a result. Each is found at once, because a conversation may have thousands of them."""

    _queues: defaultdict[tuple[str, str | None], deque[_Call]] = field(default_factory=lambda: defaultdict(deque))

    def add(self, call: _Call) -> None:
        for key in (("id", call.call_id), ("name", call.name), ("name", None)):
            self._queues[key].append(call)

    def answer(self, call_id: Any, name: Any) -> _Call | None:
        """The first call with this id or, without an id, with this name (None: any name); it has its result now."""
        key = ("id", call_id) if call_id else ("name", name)
        queue = self._queues.get(key) if isinstance(key[1], str | None) else None
        while queue:
            call = queue.popleft()
            if not call.is_answered:  # found by another key
                call.is_answered = True
                return call
        return None


def chat_messages(messages: Sequence[Message], model: str, limits: ImageLimits | None) -> list[Message]:
    """The messages for the chat template; `limits` are those for images, if the model takes any.

    A result may name its tool; it then answers the first call of that tool that has no result yet. Templates that show
    ids get the client's or, if there are none, generated ones.

    Raises:
        InvalidParameter: a field has the wrong type, or there are too many messages.
        UnsupportedParameter: there are images, but the model takes none.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidParameter(
            f"messages may hold at most {MAX_MESSAGES} messages, got {len(messages)}", param="messages"
        )
    made: list[Message] = []
    waiting = _Calls()
    num_calls = 0
    for index, message in enumerate(messages):
        images = image_parts(f"messages[{index}].images", message.get("images"), model, limits)
        role = message.get("role")
        said: Message = {"role": role.lower() if isinstance(role, str) else role, "content": message.get("content")}
        if said["content"] is None and said["role"] != "assistant":
            said["content"] = ""
        if images:
            said["content"] = [*images, {"type": "text", "text": said["content"]}]
        if message.get("thinking"):
            said["reasoning"] = message["thinking"]
        if calls := message.get("tool_calls"):
            said["tool_calls"] = []
            for call in _checked(f"messages[{index}].tool_calls", calls):
                function, num_calls = call["function"], num_calls + 1
                call_id = str(call.get("id") or f"call{num_calls:05d}")  # nine letters and digits: Mistral's rule
                waiting.add(_Call(call_id, str(function.get("name"))))
                said["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        if said["role"] == "tool":
            said |= _answered(message, waiting)
        made.append(said)
    return made


def _answered(message: Message, waiting: _Calls) -> Message:
    """The fields that say which call a result answers."""
    call_id, name = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
    if call := waiting.answer(call_id, name):
        return {"tool_call_id": call.call_id, "name": call.name}
    return {"tool_call_id": call_id or "", **({"name": name} if name else {})}


def _checked(field: str, calls: Any) -> list[Message]:
    if not isinstance(calls, list):
        raise InvalidParameter(f"{field}: expected a list", param=field)
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidParameter(f"{field}[{at}].function: expected an object with a name", param=field)
    return calls
