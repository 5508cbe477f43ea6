"""The items of /v1/responses as chat messages.

reasoning, message (assistant), function_call ...   -->  one assistant message
function_call_output                                -->  a tool message
message (any other role)                            -->  a message of that role
"""

import re
from typing import Any

from penstock.frontend.draws import DRAWS
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter

MAX_ITEMS = 4096
MAX_REFERENCES = 1024
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")

Item = dict[str, Any]

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def as_messages(items: list[Item], instructions: str | None, *, takes_images: bool) -> list[dict[str, Any]]:
    """The conversation of these items, with the instructions as its first message.

    Messages and results may have images, like those of chats, if the model takes any.

    Raises:
        InvalidParameter: naming the item and what is wrong with it.
        UnsupportedParameter: for items that a text model cannot take.
    """
    _check_number(items)
    read_content = _content if takes_images else _text
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    assistant: dict[str, Any] | None = None  # the message that further items are still added to
    for index, item in enumerate(items):
        field = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            messages.append(
                {"role": item.get("role"), "content": read_content(f"{field}.content", item.get("content"))}
            )
            assistant = None
        elif kind == "function_call_output":
            output = read_content(f"{field}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": _string(field, item, "call_id"), "content": output})
            assistant = None
        elif kind in ("message", "reasoning", "function_call"):
            if assistant is None or (kind != "function_call" and "content" in assistant):
                assistant = {"role": "assistant"}
                messages.append(assistant)
            _add_to_assistant(assistant, field, kind, item)
        else:
            raise UnsupportedParameter(
                f"{field}: items of type {kind!r} are not supported"[:256], param=f"{field}.type"
            )
    return messages


def _check_number(items: list[Item]) -> None:
    if len(items) > MAX_ITEMS:
        raise InvalidParameter(f"input may hold {MAX_ITEMS} items at most, got {len(items)}", param="input")


def _add_to_assistant(message: dict[str, Any], field: str, kind: str, item: Item) -> None:
    if kind == "message":
        message["content"] = _text(f"{field}.content", item.get("content"))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = _text(f"{field}.content", parts)
        message["reasoning_content"] = "\n".join(filter(None, [message.get("reasoning_content", ""), text]))
    else:
        function = {"name": _string(field, item, "name"), "arguments": _string(field, item, "arguments")}
        call = {"id": _string(field, item, "call_id"), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _string(field: str, item: Item, key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidParameter(f"{field}.{key}: expected a text", param=f"{field}.{key}")
    return value


def _content(field: str, content: Any) -> str | list[Any]:
    """A text, or parts including images, in the form that chats read."""
    if isinstance(content, list) and any(map(_is_image, content)):
        for index, part in enumerate(content):
            if not _is_image(part):
                _text(f"{field}[{index}]", [part])
        return content
    return _text(field, content)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _text(field: str, content: Any) -> str:
    """A text, or parts that are texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"{field}: expected a text or a list of parts", param=field)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidParameter(f"{field}[{index}]: expected an object with a type", param=f"{field}[{index}]")
        if part["type"] not in TEXT_PARTS:
            raise UnsupportedParameter(
                f"{field}[{index}]: this model takes parts of type 'input_text' only", param=f"{field}[{index}].type"
            )
        texts.append(_string(f"{field}[{index}]", part, "refusal" if part["type"] == "refusal" else "text"))
    return "\n".join(texts)


def known_items(items: list[Item]) -> list[Item]:
    """Items that `as_messages` has accepted, each with an id and only the fields that have a meaning here.

    These are stored; other fields would only take space.
    """
    return [_known(item) for item in items]


def _known(item: Item) -> Item:
    kind = item.get("type", "message")
    given = item.get("id")
    is_usable = isinstance(given, str) and _ID.fullmatch(given)
    item_id = given if is_usable else f"{_PREFIXES.get(kind, 'msg')}_{DRAWS.get().randbytes(16).hex()}"
    if kind == "function_call":
        fields = {name: item[name] for name in ("call_id", "name", "arguments")}
    elif kind == "function_call_output":
        fields = {"call_id": item["call_id"], "output": _known_parts(item["output"], None)}
    elif kind == "reasoning":
        fields = {name: _known_parts(item.get(name) or [], None) for name in ("summary", "content")}
    else:
        role = item.get("role")
        content = _known_parts(item["content"], "output_text" if role == "assistant" else "input_text")
        fields = {"role": role, "content": content}
    return {"id": item_id, "type": kind, "status": "completed", **fields}


def _known_parts(content: Any, text_type: str | None) -> Any:
    """Parts with only their texts and images; a text becomes a part of `text_type`, or stays a text if that is None."""
    if isinstance(content, str):
        return content if text_type is None else [{"type": text_type, "text": content}]
    names = ("type", "text", "refusal", "image_url", "detail")
    return [{name: part[name] for name in names if isinstance(part.get(name), str)} for part in content]


def references(items: list[Item]) -> list[str]:
    """The ids in items that are references to stored ones.

    Raises:
        InvalidParameter: if one has no usable id, or there are too many items or references.
    """
    _check_number(items)
    found = []
    for index, item in enumerate(items):
        if item.get("type") == "item_reference":
            item_id = item.get("id")
            if not isinstance(item_id, str) or not _ID.fullmatch(item_id):
                raise InvalidParameter(f"input[{index}].id: expected an item's id", param=f"input[{index}].id")
            found.append(item_id)
    if len(found) > MAX_REFERENCES:  # each is looked up in the database
        raise InvalidParameter(f"input may hold {MAX_REFERENCES} references at most, got {len(found)}", param="input")
    return found


def resolved(items: list[Item], known: dict[str, Item]) -> list[Item]:
    """The items, with references replaced by the stored items.

    Raises:
        InvalidParameter: for an item that is not stored.
    """
    for index, item in enumerate(items):
        if item.get("type") == "item_reference" and item["id"] not in known:
            raise InvalidParameter(
                f"input[{index}]: item {item['id']!r} not found or deleted", param=f"input[{index}].id"
            )
    return [known[item["id"]] if item.get("type") == "item_reference" else item for item in items]
