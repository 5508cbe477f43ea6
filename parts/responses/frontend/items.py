"""The items of /v1/responses as chat messages.

reasoning, message (assistant), calls ...   -->  one assistant message
results of calls                            -->  a tool message
message (any other role), compaction        -->  a message of that role, or of the user

`tool_items.py` has the many types of calls and results, and those that the model is not shown.
"""

import re
from typing import Any

from penstock.frontend.draws_and_clock import DRAWS
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.parts.responses.frontend.summaries import as_message, opened
from penstock.parts.responses.frontend.tool_items import (
    ID_PREFIXES,
    LEFT_OUT,
    TOOL_TYPES,
    Item,
    ShownCall,
    call_id_of,
    shown_tool,
    string,
)

MAX_ITEMS = 4096
MAX_REFERENCES = 1024
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")

_COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
"""OpenAI's name, and those that agents give the same item."""
_KNOWN = ("message", "reasoning", *TOOL_TYPES, "compaction", *LEFT_OUT, "item_reference")

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def as_messages(
    items: list[Item], instructions: str | None, *, takes_images: bool, warnings: list[str]
) -> list[dict[str, Any]]:
    """The conversation of these items, with the instructions as its first message.

    Messages and results may have images, like those of chats, if the model takes any. What the model is not shown is
    noted in `warnings`.

    Raises:
        InvalidParameter: naming the item and what is wrong with it.
        UnsupportedParameter: for items that a text model cannot take.
    """
    _check_number(items)
    conversation = _Messages(takes_images)
    if instructions is not None:
        conversation.messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        conversation.add(f"input[{index}]", item)
    warnings += (f"input: {kind} was left out: {why}" for kind, why in conversation.left_out.items())
    return conversation.messages


class _Messages:
    """The messages so far."""

    def __init__(self, takes_images: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}  # what, and why
        self._read_content = _content if takes_images else _text
        self._assistant: dict[str, Any] | None = None  # the message that further items are still added to

    def add(self, field: str, item: Item) -> None:
        """Add an item."""
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") != "assistant":
            content = self._read_content(f"{field}.content", item.get("content"))
            self._append({"role": item.get("role"), "content": content})
        elif kind == "message":
            self._open(is_call=False)["content"] = _text(f"{field}.content", item.get("content"))
        elif kind == "reasoning":
            self._add_reasoning(field, item)
        elif kind in TOOL_TYPES:
            shown = shown_tool(field, item, _result)
            for part in shown:
                if isinstance(part, ShownCall):
                    self._open(is_call=True).setdefault("tool_calls", []).append(part.in_chat())
                else:
                    self._append(part.in_chat())
            if not shown:
                self.left_out[f"an item of type {kind!r}"] = "it holds no results"
        elif kind in _COMPACTIONS:
            if summary := opened(item.get("encrypted_content")):
                self._append(as_message(summary))
            else:
                self.left_out[f"an item of type {kind!r}"] = "only the server that wrote it can read it"
        elif isinstance(kind, str) and kind in LEFT_OUT:
            self.left_out[f"an item of type {kind!r}"] = LEFT_OUT[kind]
        else:
            raise UnsupportedParameter(
                f"{field}: items of type {str(kind)[:64]!r} are not known; known: {', '.join(_KNOWN)}",
                param=f"{field}.type",
            )

    def _add_reasoning(self, field: str, item: Item) -> None:
        text = _text(f"{field}.content", item.get("content") or item.get("summary") or [])
        if not text and item.get("encrypted_content"):
            self.left_out["reasoning in encrypted_content"] = "only the server that wrote it can read it"
            return
        message = self._open(is_call=False)
        message["reasoning_content"] = "\n".join(filter(None, [message.get("reasoning_content", ""), text]))

    def _open(self, *, is_call: bool) -> dict[str, Any]:
        """The assistant's message that an item belongs to; calls follow the content, and nothing else does."""
        if self._assistant is None or (not is_call and "content" in self._assistant):
            self._append({"role": "assistant"})
            self._assistant = self.messages[-1]
        return self._assistant

    def _append(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._assistant = None


def _check_number(items: list[Item]) -> None:
    if len(items) > MAX_ITEMS:
        raise InvalidParameter(f"input may hold {MAX_ITEMS} items at most, got {len(items)}", param="input")


def _result(field: str, content: Any) -> str | list[Any]:
    """A result's text, or its parts if there are images or files among them; a text model is shown notes for those."""
    if isinstance(content, list) and any(_is_image(part) or _is_file(part) for part in content):
        for index, part in enumerate(content):
            if not (_is_image(part) or _is_file(part)):
                _text(f"{field}[{index}]", [part])
        return content
    return _text(field, content)


def _is_file(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_file"


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
        texts.append(string(f"{field}[{index}]", part, "refusal" if part["type"] == "refusal" else "text"))
    return "\n".join(texts)


def known_items(items: list[Item]) -> list[Item]:
    """Items that `as_messages` has accepted, each with an id and only the fields that have a meaning here.

    These are stored; other fields would only take space.
    """
    return [_known(item) for item in items]


def _known(item: Item) -> Item:
    kind = item.get("type") or "message"
    given = item.get("id")
    is_usable = isinstance(given, str) and _ID.fullmatch(given)
    prefix = "msg" if kind == "message" else ID_PREFIXES.get(kind, "item")
    item_id = given if is_usable else f"{prefix}_{DRAWS.get().randbytes(16).hex()}"
    if kind == "function_call":
        fields = {name: item[name] for name in ("call_id", "name", "arguments")}
    elif kind == "custom_tool_call":
        fields = {name: item[name] for name in ("call_id", "name", "input")}
    elif kind in ("function_call_output", "custom_tool_call_output"):
        fields = {"call_id": item["call_id"], "output": _known_parts(item["output"], None)}
    elif kind == "reasoning":
        fields = {name: _known_parts(item.get(name) or [], None) for name in ("summary", "content")}
    elif kind == "message":
        role = item.get("role")
        content = _known_parts(item["content"], "output_text" if role == "assistant" else "input_text")
        fields = {"role": role, "content": content}
    else:  # of other servers and agents: kept as they are
        fields = {name: value for name, value in item.items() if name not in ("id", "type")}
        if kind in TOOL_TYPES:
            fields["call_id"] = call_id_of(item)  # whatever becomes of the item's own
    return {"id": item_id, "type": kind, "status": "completed", **fields}


def _known_parts(content: Any, text_type: str | None) -> Any:
    """Parts with only their texts and images; a text becomes a part of `text_type`, or stays a text if that is None."""
    if isinstance(content, str):
        return content if text_type is None else [{"type": text_type, "text": content}]
    names = ("type", "text", "refusal", "image_url", "detail", "file_id", "filename")
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
