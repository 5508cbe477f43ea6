"""A Messages request's `system` and `messages` as chat messages.

tool_result ...                      -->  tool messages, before the rest of the turn
text behind them, of an agent        -->  text of the last of these
text, document, search_result        -->  the turn's text
image                                -->  a part of the turn, or of the tool message
thinking, text, tool_use ...         -->  one assistant message
server_tool_use and its result       -->  a call in it, a tool message, and a new assistant message
system, in the midst of messages     -->  text of a turn next to it

A system message between others goes into a user's turn, because many templates refuse it elsewhere. It never moves to
the front: agents add one in nearly every turn, and the prompt's beginning must not change for the prefix cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.parts.anthropic.frontend import server_tools
from penstock.parts.anthropic.frontend.schema import Block, CountTokensRequest
from penstock.parts.anthropic.frontend.signature import hidden_thinking

_ATTRIBUTION = "x-anthropic-billing-header"
"""Start of a system block that names the agent. It differs in each request, so the prefix cache would never hit."""

_REMINDER = "<system-reminder>"
"""Start of a text that an agent, not its user, puts behind results."""

_ERROR_MARKS = ("error", "<tool_use_error>")
"""Beginnings of results whose text already says that they are errors."""


Content = str | list[dict[str, Any]]
"""A text or, if there are images, the parts of a chat message."""


@dataclass(slots=True)
class Conversation:
    """Chat messages, and for each of them the field that it came from."""

    takes_images: bool  # whether the model does
    messages: list[dict[str, Any]] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    left_out: dict[str, None] = field(default_factory=dict)  # types of blocks that the model is not shown
    _texts: list[str] = field(default_factory=list)  # more text of the last message, and what separates it
    _thoughts: list[str] = field(default_factory=list)  # the last message's reasoning

    @property
    def warnings(self) -> list[str]:
        """What the client is told of blocks that the model is not shown."""
        return [f"messages: a block of type {kind[:64]!r} was left out: it has no text" for kind in self.left_out]

    @property
    def is_continued(self) -> bool:
        """Whether the answer continues the last message."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    @property
    def last_role(self) -> str:
        """The last message's role; empty if there is no message."""
        return str(self.messages[-1]["role"]) if self.messages else ""

    def add(self, name: str, role: str, content: Content | None, **fields: Any) -> None:
        """Append a message."""
        self.join()
        self.messages.append({"role": role, "content": content, **fields})
        self.fields.append(name)

    def append_text(self, text: str, separator: str = "\n") -> None:
        """Append to the last message."""
        last = self.messages[-1]
        if isinstance(last["content"], list):
            last["content"].append({"type": "text", "text": separator + text})
            return
        last["content"] = last["content"] or ""
        if text:
            self._texts += (separator, text) if last["content"] or self._texts else (text,)

    def append_thoughts(self, thoughts: list[str]) -> None:
        """Append to the last message's reasoning."""
        self._thoughts += filter(None, thoughts)

    def join(self) -> None:
        """Put appended texts into the last message. That is done once, because a turn may be thousands of messages."""
        if self._texts:
            self.messages[-1]["content"] += "".join(self._texts)
            self._texts.clear()
        if self._thoughts:
            self.messages[-1]["reasoning_content"] = "\n".join(self._thoughts)
            self._thoughts.clear()

    def append(self, content: Content) -> None:
        """Append a text, or parts, to the last message."""
        if isinstance(content, str):
            self.append_text(content)
            return
        self.join()
        last = self.messages[-1]
        if isinstance(last["content"], list):
            last["content"] += content
        else:
            last["content"] = [{"type": "text", "text": last["content"]}, *content] if last["content"] else content


def conversation_of(request: CountTokensRequest, *, takes_images: bool) -> Conversation:
    """The chat of a request.

    Raises:
        InvalidParameter: naming the block and what is wrong with it.
        UnsupportedParameter: for blocks that a text model cannot take.
    """
    found = Conversation(takes_images)
    if system := _system_text("system", request.system):
        found.add("system", "system", system)
    if not request.messages:
        raise InvalidParameter("messages is required, and must not be empty", param="messages")
    asides: list[str] = []  # texts of system messages that are not in a turn yet
    results = server_tools.results_of(request.messages)
    for index, message in enumerate(request.messages):
        name, role = f"messages[{index}]", message.get("role")
        if role == "user":
            _add_user_turn(found, name, message.get("content"), asides)
            asides = []
        elif role == "assistant":
            if asides:
                found.add(name, "user", "\n\n".join(asides))
                asides = []
            _add_assistant_turn(found, name, message.get("content"), results)
        elif role == "system":
            text = _system_text(f"{name}.content", message.get("content"))
            if found.last_role in ("user", "tool") and text:
                found.append_text(text, "\n\n")
            elif found.last_role == "system" and text:
                found.append_text(text)
            elif not found.messages and text:
                found.add(name, "system", text)
            elif text:
                asides.append(text)
        else:
            raise InvalidParameter(f"{name}.role must be 'user', 'assistant' or 'system'", param=f"{name}.role")
    if asides:
        found.add(name, "user", "\n\n".join(asides))
    if found.is_continued and found.messages[-1].get("tool_calls"):
        raise InvalidParameter(f"{name}: a tool_result must follow each tool_use", param=name)
    found.join()
    return found


def _system_text(name: str, content: Any) -> str:
    blocks = _blocks(name, content) if content is not None else []
    texts = [_text(f"{name}[{index}]", block, ("text",)) for index, block in enumerate(blocks)]
    return "\n".join(text for text in texts if text and not text.startswith(_ATTRIBUTION))


def _add_user_turn(found: Conversation, name: str, content: Any, asides: list[str]) -> None:
    parts: list[dict[str, Any]] = []
    num_results, is_empty = 0, True
    for index, block in enumerate(_blocks(f"{name}.content", content)):
        at = f"{name}.content[{index}]"
        if block.get("type") == "tool_result":
            found.add(name, "tool", _result(found, at, block), tool_call_id=_string(at, block, "tool_use_id"))
            num_results += 1
            continue
        if block["type"] in server_tools.LEFT_OUT:
            found.left_out[block["type"]] = None
            is_empty = False
            continue
        part = _part(found, at, block, tuple(_TEXTS))
        if num_results and not parts and part.get("text", "").startswith(_REMINDER):
            found.append_text(part["text"], "\n\n")  # as a user's turn it would end the loop for the template
        else:
            parts.append(part)
    if asides and parts:
        aside = "\n\n".join(asides)
        if parts[0]["type"] == "text":
            parts[0]["text"] = f"{aside}\n\n{parts[0]['text']}"
        else:
            parts.insert(0, {"type": "text", "text": aside})
    elif asides and found.last_role == "assistant":
        found.add(name, "user", "\n\n".join(asides))
    elif asides:
        found.append_text("\n\n".join(asides), "\n\n")
    if parts and found.last_role == "user":
        found.append(_joined(parts))
    elif parts:
        found.add(name, "user", _joined(parts))
    elif is_empty and not num_results:
        raise InvalidParameter(f"{name}.content is empty", param=f"{name}.content")


def _add_assistant_turn(found: Conversation, name: str, content: Any, results: dict[str, str]) -> None:
    """Add a turn; `results` are those of tools that a server has run, by the ids of their calls."""
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    is_complete = True  # nothing was left out

    def add() -> None:
        """Add what has come to the last message."""
        if found.last_role != "assistant":
            found.add(name, "assistant", None)
        if texts:
            found.append_text("\n".join(texts))
        found.append_thoughts(thoughts)
        if calls:
            found.messages[-1].setdefault("tool_calls", []).extend(calls)
        for part in (thoughts, texts, calls):
            part.clear()

    for index, block in enumerate(_blocks(f"{name}.content", content)):
        at, kind = f"{name}.content[{index}]", block["type"]
        if kind == "thinking":
            thoughts.append(_string(at, block, "thinking") or hidden_thinking(block.get("signature")))
        elif kind == "redacted_thinking":
            _string(at, block, "data")  # encrypted: checked, but not used
        elif kind == "tool_use":
            calls.append(_call(at, block))
        elif kind in server_tools.CALLS and _string(at, block, "id") in results:
            calls.append(server_tools.call_of(block))
        elif server_tools.is_result(kind) and _string(at, block, "tool_use_id") in results:
            if texts or thoughts or calls or found.last_role != "tool":  # calls beside each other have one message
                add()
            found.add(name, "tool", results[block["tool_use_id"]], tool_call_id=block["tool_use_id"])
        elif kind == "compaction" and isinstance(block.get("content"), str):
            texts.append(block["content"])
        elif kind in (*server_tools.CALLS, *server_tools.LEFT_OUT, "compaction") or server_tools.is_result(kind):
            found.left_out[kind] = None
            is_complete = False
        else:
            texts.append(_text(at, block, ("text",)))
    if texts or thoughts or calls or (is_complete and found.last_role != "tool"):
        add()


def _call(at: str, block: Block) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidParameter(f"{at}.input: expected an object", param=f"{at}.input")
    function = {"name": _string(at, block, "name"), "arguments": given}
    return {"id": _string(at, block, "id"), "type": "function", "function": function}


def _result(found: Conversation, at: str, block: Block) -> Content:
    content = block.get("content")
    blocks = _blocks(f"{at}.content", content) if content is not None else []
    kinds = (*_TEXTS, "tool_reference")
    parts = [_part(found, f"{at}.content[{index}]", part, kinds, is_result=True) for index, part in enumerate(blocks)]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    is_error = block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise InvalidParameter(f"{at}.is_error: expected a boolean", param=f"{at}.is_error")
    if is_error and not text.lower().startswith(_ERROR_MARKS):
        text = f"Error: {text}"
        parts = [{"type": "text", "text": text}, *(part for part in parts if part["type"] != "text")]
    joined = _joined(parts)
    return text if isinstance(joined, str) else joined


def _joined(parts: list[dict[str, Any]]) -> Content:
    """The joined text of parts; the parts themselves if there are images among them."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(
    found: Conversation, at: str, block: Block, kinds: tuple[str, ...], *, is_result: bool = False
) -> dict[str, Any]:
    """A block as a part of a chat's message. In a result, what the model cannot read stays as it is: it gets a note."""
    if is_result and _is_unreadable(block, takes_images=found.takes_images):
        return {"type": block["type"]}
    if block["type"] == "image" and not found.takes_images:
        raise UnsupportedParameter(f"{at}: this model takes no images", param=at)
    if block["type"] != "image":
        return {"type": "text", "text": _text(at, block, kinds)}
    source, name = block.get("source"), f"{at}.source"
    if not isinstance(source, dict):
        raise InvalidParameter(f"{name}: expected an object", param=name)
    match source.get("type"):
        case "base64":
            data = f"data:{_string(name, source, 'media_type')};base64,{_string(name, source, 'data')}"
        case "url":
            data = _string(name, source, "url")
            if data[:5].lower() == "data:":
                raise InvalidParameter(f"{name}.url: expected an http or https address", param=f"{name}.url")
        case kind:
            raise UnsupportedParameter(
                f"{name}: images of type {str(kind)[:64]!r} are not supported; supported: base64, url", param=name
            )
    return {"type": "image_url", "image_url": data}


def _is_unreadable(block: Block, *, takes_images: bool) -> bool:
    if block["type"] == "image":
        return not takes_images
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    return block["type"] == "document" and kind in ("base64", "url", "file")


# --- single blocks ----------------------------------------------------------------------------


def _blocks(name: str, content: Any) -> list[Block]:
    """Content is a string, which stands for one block of text, or a list of blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidParameter(f"{name}: expected a string or a list of content blocks", param=name)
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidParameter(f"{name}[{index}]: expected an object with a type", param=f"{name}[{index}]")
    return content


def _text(at: str, block: Block, kinds: tuple[str, ...]) -> str:
    """The text of a block, which must be of one of these kinds."""
    kind = block["type"]
    read = _TEXTS.get(kind) if kind in kinds else None
    if read is not None:
        return read(at, block)
    if kind == "tool_reference" and kind in kinds:
        return f"The tool {_string(at, block, 'tool_name')} is available."
    if kind == "image":
        where = "images are read in messages of users, and in results of tools there"
        raise UnsupportedParameter(f"{at}: {where}", param=at)
    raise UnsupportedParameter(
        f"{at}: blocks of type {kind[:64]!r} are not supported here; supported: {', '.join(kinds)}", param=f"{at}.type"
    )


def _plain(at: str, block: Block) -> str:
    return _string(at, block, "text")


def _document(at: str, block: Block) -> str:
    """A document's title, context and text."""
    source, name = block.get("source"), f"{at}.source"
    if not isinstance(source, dict):
        raise InvalidParameter(f"{name}: expected an object", param=name)
    kind = source.get("type")
    if kind == "text":
        text = _string(name, source, "data")
    elif kind == "content":
        parts = _blocks(f"{name}.content", source.get("content"))
        text = "\n".join(_text(f"{name}.content[{index}]", part, ("text",)) for index, part in enumerate(parts))
    else:
        raise UnsupportedParameter(
            f"{name}: documents of type {str(kind)[:64]!r} are not supported; supported: text, content", param=name
        )
    return "\n".join(filter(None, (_title(at, block, "title"), _title(at, block, "context"), text)))


def _search_result(at: str, block: Block) -> str:
    """A search result's title, source and text."""
    parts = _blocks(f"{at}.content", block.get("content"))
    texts = [_text(f"{at}.content[{index}]", part, ("text",)) for index, part in enumerate(parts)]
    return "\n".join((_string(at, block, "title"), _string(at, block, "source"), *texts))


_TEXTS: dict[str, Callable[[str, Block], str]] = {
    "text": _plain,
    "document": _document,
    "search_result": _search_result,
}
"""Types of blocks that contain text, and how it is read."""


def _string(at: str, block: Block, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidParameter(f"{at}.{name}: expected a string", param=f"{at}.{name}")
    return value


def _title(at: str, block: Block, name: str) -> str:
    return _string(at, block, name) if block.get(name) is not None else ""
