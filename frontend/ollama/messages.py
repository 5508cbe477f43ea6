"""Turns Ollama's messages (tool names instead of ids, arguments as objects, images beside texts) into a chat's."""

from collections.abc import Sequence
from typing import Any

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.image_source import ImageLimits
from penstock.frontend.ollama.options import image_parts

Message = dict[str, Any]


def chat_messages(messages: Sequence[Message], model: str, limits: ImageLimits | None) -> list[Message]:
    """The messages for the chat template; `limits` are those for images, if the model takes any.

    A result may name its tool; it then answers the first call of that tool that has no result yet. Templates that show
    ids get the client's or, if there are none, generated ones.

    Raises:
        InvalidParameter: a field has the wrong type.
        UnsupportedParameter: there are images, but the model takes none.
    """
    made: list[Message] = []
    waiting: list[tuple[str, str]] = []  # calls without a result: id and name
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
                waiting.append((call_id, str(function.get("name"))))
                said["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        if said["role"] == "tool":
            said |= _answered(message, waiting)
        made.append(said)
    return made


def _answered(message: Message, waiting: list[tuple[str, str]]) -> Message:
    """The fields that say which call a result answers."""
    call_id, name = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
    for at, (other_id, other_name) in enumerate(waiting):
        if call_id == other_id or (not call_id and name in (None, other_name)):
            del waiting[at]
            return {"tool_call_id": other_id, "name": other_name}
    return {"tool_call_id": call_id or "", **({"name": name} if name else {})}


def _checked(field: str, calls: Any) -> list[Message]:
    if not isinstance(calls, list):
        raise InvalidParameter(f"{field}: expected a list", param=field)
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidParameter(f"{field}[{at}].function: expected an object with a name", param=field)
    return calls
