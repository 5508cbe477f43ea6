"""Tool calls written as JSON objects, read as they grow.

    {"name": "get_weather", "arguments": {"city": "Oslo"}}
             ^ known here    ^............^ handed on piece by piece, verbatim

`ObjectReader` splits an object into pieces of its members' values; `CallReader` makes a call of them; the
functions read them from a block. All give the same result however the text is cut.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.frontend.parsing.calls.block import MAX_UNDECIDED, Block, EndOfTextError, NoCallError, Reading

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")

_SPACE = " \t\r\n"
_NESTED = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")


class ObjectReader:
    """Reads one JSON object from its opening brace on; `pieces` gets (key, text of the value, is its end)."""

    def __init__(self, lone_key: str = "") -> None:
        """With `lone_key` there is only a value, which is taken for that key's."""
        self.pieces: list[tuple[str, str, bool]] = []
        self.is_done = False
        self.has_failed = False
        self._step: Callable[[str, int], int] = self._before_value if lone_key else self._opening
        self._is_lone = bool(lone_key)
        self._key = lone_key
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self._is_closed = False  # the string that was read last ended
        self._is_scalar = False

    def feed(self, text: str) -> int:
        """Take text; return how much of it belongs to the object."""
        position = 0
        while position < len(text) and not self.is_done and not self.has_failed:
            position = self._step(text, position)
        return position

    def _opening(self, text: str, position: int) -> int:
        self.has_failed = text[position] != "{"
        self._step = self._before_key
        return position + 1

    def _before_key(self, text: str, position: int) -> int:
        position = _skip(text, position, _SPACE + ",")
        if position == len(text):
            return position
        if text[position] == "}":
            self.is_done = True
        elif text[position] == '"':
            self._key = '"'
            self._step = self._in_key
        else:
            self.has_failed = True
            return position
        return position + 1

    def _in_key(self, text: str, position: int) -> int:
        end = self._string_end(text, position)
        self._key += text[position:end]
        if not self._is_closed:
            return end
        key = _decoded(self._key)
        if isinstance(key, str):
            self._key = key
            self._step = self._before_colon
        else:
            self.has_failed = True
        return end

    def _before_colon(self, text: str, position: int) -> int:
        position = _skip(text, position, _SPACE)
        if position == len(text):
            return position
        self.has_failed = text[position] != ":"
        self._step = self._before_value
        return position + 1

    def _before_value(self, text: str, position: int) -> int:
        position = _skip(text, position, _SPACE)
        if position == len(text):
            return position
        first = text[position]
        if first in ",}]:":
            self.has_failed = True
            return position
        self._is_scalar = first not in '"{['
        self._depth = 0
        self._is_string = False
        self._step = self._in_value
        return position

    def _in_value(self, text: str, position: int) -> int:
        end, is_end = self._scalar_end(text, position) if self._is_scalar else self._value_end(text, position)
        if end > position or is_end:
            self.pieces.append((self._key, text[position:end], is_end))
        if is_end:
            self._step = self._before_key
            self.is_done = self._is_lone
        return end

    def _scalar_end(self, text: str, position: int) -> tuple[int, bool]:
        found = _SCALAR_END.search(text, position)
        return (len(text), False) if found is None else (found.start(), True)

    def _value_end(self, text: str, position: int) -> tuple[int, bool]:
        """The end of a string, an object or an array, or of what there is of it."""
        while position < len(text):
            if self._is_string:
                end = self._string_end(text, position)
                if not self._is_closed:
                    return end, False
                self._is_string = False
                position = end
                if self._depth == 0:
                    return position, True
                continue
            found = _NESTED.search(text, position)
            if found is None:
                return len(text), False
            position = found.end()
            if found[0] == '"':
                self._is_string = True
                continue
            self._depth += 1 if found[0] in "{[" else -1
            if self._depth == 0:
                return position, True
        return position, False

    def _string_end(self, text: str, position: int) -> int:
        """Behind the quote that closes a string, or the end of the text; `_is_escaped` carries over."""
        self._is_closed = False
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            found = _IN_STRING.search(text, position)
            if found is None:
                return len(text)
            position = found.end()
            if found[0] == '"':
                self._is_closed = True
                return position
            self._is_escaped = True
        return position


class CallReader:
    """A call from its object: its name as soon as it is certain, then its arguments as they come.

    It is certain ("committed") once the name is known and the arguments begin or the object ends. An
    object that is no call ends in `has_failed` before that.
    """

    def __init__(self, known_names: frozenset[str] | None = None, *, name: str = "") -> None:
        """With `known_names` an object is a call only if its name is one of them.

        With `name` the call's name is known already, and what comes is the value of its arguments alone.
        """
        self._reader = ObjectReader(ARGUMENT_KEYS[0] if name else "")
        self._known_names = known_names
        self._raw_name = ""
        self._raw_function = ""
        self._held = ""  # arguments that came before the name, or that are no object
        self._arguments_key = ""
        self._are_arguments_over = False
        self._is_streaming = False
        self.name = name
        self.is_committed = False
        self.is_done = False
        self.has_failed = False

    def feed(self, text: str) -> tuple[int, str]:
        """Take text; return how much of it belongs to the call, and the arguments that may be handed on now."""
        taken = self._reader.feed(text)
        shown: list[str] = []
        for key, piece, is_end in self._reader.pieces:
            shown.append(self._piece(key, piece, is_end))
            if self.has_failed:
                break
        self._reader.pieces.clear()
        if self._reader.has_failed:
            self._fail()
        elif self._reader.is_done and not self.has_failed:
            shown.append(self._end())
        return taken, "".join(shown)

    def _piece(self, key: str, piece: str, is_end: bool) -> str:
        if key in NAME_KEYS and not self.name:
            self._raw_name += piece
            return self._named(_decoded(self._raw_name)) if is_end else ""
        if key == "function" and not self.name:
            self._raw_function += piece
            return self._from_function(_decoded(self._raw_function)) if is_end else ""
        if key in ARGUMENT_KEYS and not self._are_arguments_over and self._arguments_key in ("", key):
            return self._argument_piece(key, piece, is_end)
        return ""

    def _named(self, name: Any) -> str:
        if not isinstance(name, str) or not name or (self._known_names is not None and name not in self._known_names):
            self._fail()
            return ""
        self.name = name
        if not self._arguments_key:
            return ""
        self.is_committed = True
        if not (self._is_streaming or self._are_arguments_over):
            return ""
        held, self._held = self._held, ""
        return held

    def _from_function(self, function: Any) -> str:
        """OpenAI's own shape: {"type": "function", "function": {"name": ..., "arguments": ...}}."""
        if not isinstance(function, dict):
            return self._named(function)
        for key in ARGUMENT_KEYS:
            if key in function and not self._arguments_key:
                self._arguments_key = key
                self._are_arguments_over = True
                value = function[key]
                self._held = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        return self._named(function.get("name"))

    def _argument_piece(self, key: str, piece: str, is_end: bool) -> str:
        if not self._arguments_key:
            self._arguments_key = key
            self._is_streaming = piece[0] == "{"
            self.is_committed = bool(self.name)
        self._are_arguments_over = is_end
        if self._is_streaming and self.name:
            return piece
        self._held += piece
        if is_end and not self._is_streaming:
            self._held = _as_arguments(self._held)
        if is_end and self.name:
            held, self._held = self._held, ""
            return held
        return ""

    def _end(self) -> str:
        self.is_done = True
        if not self.name:
            self._fail()
            return ""
        self.is_committed = True
        return "" if self._arguments_key else "{}"

    def _fail(self) -> None:
        self.has_failed = True


def read_object(block: Block, *, known_only: bool = False) -> Reading[None]:
    """Read one call from its object's opening brace on; with `known_only` it must be of an offered tool."""
    yield from _read(block, CallReader(block.names if known_only else None))


def read_arguments(block: Block, name: str, call_id: str = "") -> Reading[None]:
    """Read the arguments of a call whose name is known: an object, or JSON within a text."""
    if (yield from block.peek()) not in ("{", '"'):
        raise NoCallError
    block.start_call(name, call_id)
    yield from _read(block, CallReader(name=name))


def read_objects(block: Block, *, known_only: bool = False) -> Reading[None]:
    """Read an object, or an array of them."""
    if not (yield from block.accepts("[")):
        yield from read_object(block, known_only=known_only)
        return
    has_calls = False
    while True:
        yield from block.skip(" \t\r\n,")
        if has_calls and (yield from block.accepts("]")):
            block.settle()
            return
        yield from read_object(block, known_only=known_only)
        has_calls = True


def _read(block: Block, call: CallReader) -> Reading[None]:
    if (yield from block.peek()) != "{" and not call.name:
        raise NoCallError
    while not (call.is_done or call.has_failed):
        text = block.rest
        if text and not block.is_in_call:
            text = text[: max(MAX_UNDECIDED + 1 - block.num_unsettled, 0)]
            if not text:
                raise NoCallError  # it has gone on too long
        if not text:
            if block.is_final:
                raise EndOfTextError
            yield  # as `more`, and without its cost: most tokens of a call pass here
            continue
        taken, arguments = call.feed(text)
        block.pass_over(taken)
        if call.is_committed and not block.is_in_call:
            block.start_call(call.name)
        if block.is_in_call:
            block.add(arguments)
    if not block.is_in_call:
        raise NoCallError
    block.end_call()


def _as_arguments(raw: str) -> str:
    """Arguments that are no object as written: JSON within a text is unpacked, null means none."""
    value = _decoded(raw)
    if isinstance(value, str):
        return value
    return "{}" if raw == "null" else raw


def _decoded(raw: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def read_json_string(block: Block) -> Reading[str]:
    """Read a JSON string; empty if what comes is none."""
    yield from block.expects('"')
    text = '"'
    while True:
        piece, mark = yield from block.until('"', "\\")
        text += piece + mark
        if mark == '"':
            value = _decoded(text)
            return value if isinstance(value, str) else ""
        escaped = yield from block.peek()
        text += block.take(len(escaped))
