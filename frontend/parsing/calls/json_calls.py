"""Tool calls written as JSON objects, read as they grow.

    {"name": "get_weather", "arguments": {"city": "Oslo"}}
             ^ known here    ^............^ handed on piece by piece, verbatim

A call begins once its name is known and its arguments begin, or the object ends. By then it is clear whether it is one.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.frontend.parsing.calls.block import (
    MAX_UNDECIDED,
    SPACE,
    Block,
    EndOfTextError,
    NoCallError,
    Reading,
)

NAME_KEYS = ("name", "tool_name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")

_NESTED = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")


def read_object(block: Block, *, known_only: bool = False) -> Reading[None]:
    """Read one call from its object's opening brace on; with `known_only` it must name an offered tool."""
    if (yield from block.peek()) != "{":
        raise NoCallError
    block.take(1)
    yield from _up_to_its_end(block, _read_members(block, block.names if known_only else None))


def read_arguments(block: Block, name: str, call_id: str = "") -> Reading[None]:
    """Read the arguments of a call whose name is known: an object, or JSON within a text."""
    first = yield from block.peek()
    if first not in ("{", '"'):
        raise NoCallError
    block.start_call(name, call_id)
    yield from _up_to_its_end(block, _read_arguments(block, is_object=first == "{"))


def read_objects(block: Block, *, known_only: bool = False) -> Reading[None]:
    """Read an object, or an array of them."""
    if not (yield from block.accepts("[")):
        yield from read_object(block, known_only=known_only)
        return
    has_calls = False
    while True:
        yield from block.skip(SPACE + ",")
        if has_calls and (yield from block.accepts("]")):
            block.settle()
            return
        yield from read_object(block, known_only=known_only)
        has_calls = True


def _up_to_its_end(block: Block, reading: Reading[None]) -> Reading[None]:
    """End a call that has begun where it is no longer JSON."""
    try:
        yield from reading
    except NoCallError:
        if not block.is_in_call:
            raise
    except EndOfTextError:
        if not block.is_in_call and block.num_unsettled > MAX_UNDECIDED + 1:
            raise NoCallError from None  # as in a stream, where the limit is reached before the end of the text
        raise
    block.end_call()


def _read_members(block: Block, known_names: frozenset[str] | None) -> Reading[None]:
    """Read a call's object after its brace; with `known_names` it is a call only if its name is among them."""
    name = held = ""  # arguments that came before the name
    has_arguments = False
    while True:
        yield from block.skip(SPACE + ",")
        yield from block.goes_on()
        if (yield from block.accepts("}")):
            break
        key = yield from read_json_string(block)
        yield from block.skip()
        yield from block.goes_on()
        if key is None or block.take(1) != ":":
            raise NoCallError
        yield from block.skip()
        yield from block.goes_on()
        first = yield from block.peek()
        if first in ",}]:":
            raise NoCallError
        if key in ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            if name:
                block.start_call(name)
                yield from _read_arguments(block, is_object=first == "{")
            else:
                held = yield from _whole(block)
                held = held if first == "{" else _as_arguments(held)
        elif key in NAME_KEYS and not name:
            said = _decoded((yield from _whole(block)))
            if key == "function" and isinstance(said, dict):  # {"type": "function", "function": {"name": ...}}
                given = next((said[key] for key in ARGUMENT_KEYS if key in said), None)
                if given is not None and not has_arguments:
                    has_arguments, held = True, given if isinstance(given, str) else msgspec.json.encode(given).decode()
                said = said.get("name")
            if not isinstance(said, str) or not said or (known_names is not None and said not in known_names):
                raise NoCallError
            name = said
            if has_arguments:
                block.start_call(name)
                block.add(held)
        else:
            yield from _whole(block)
    if not name:
        raise NoCallError
    if not block.is_in_call:
        block.start_call(name)
    if not has_arguments:
        block.add("{}")


def _read_arguments(block: Block, *, is_object: bool) -> Reading[None]:
    """Pass on the arguments of a call that has begun: an object as it comes, any other value once it is complete."""
    if is_object:
        yield from _read_value(block, block.add)
    else:
        block.add(_as_arguments((yield from _whole(block))))


def _whole(block: Block) -> Reading[str]:
    pieces: list[str] = []
    yield from _read_value(block, pieces.append)
    return "".join(pieces)


def _read_value(block: Block, each: Callable[[str], None]) -> Reading[None]:
    """Read a value; `each` is called with its text, verbatim, as it comes."""
    is_scalar = (yield from block.peek()) not in ("{", "[", '"')
    depth = 0
    is_string = is_escaped = is_over = False
    while True:
        text = block.rest
        end = 0
        if is_scalar:
            found = _SCALAR_END.search(text)
            end, is_over = (len(text), False) if found is None else (found.start(), True)
        while end < len(text) and not is_over:
            if is_escaped:
                is_escaped = False
                end += 1
                continue
            found = (_IN_STRING if is_string else _NESTED).search(text, end)
            if found is None:
                end = len(text)
                break
            end = found.end()
            match found[0]:
                case "\\":
                    is_escaped = True
                case '"':
                    is_string = not is_string
                    is_over = not is_string and depth == 0
                case bracket:
                    depth += 1 if bracket in "{[" else -1
                    is_over = depth == 0
        block.pass_over(end)
        if end:
            each(text[:end])
        if is_over:
            return
        if block.is_final:
            raise EndOfTextError
        if not block.is_in_call and block.num_unsettled > MAX_UNDECIDED + 1:
            raise NoCallError  # the value is too long
        yield  # does what `more` does at less cost: most tokens of a call pass here


def read_json_string(block: Block) -> Reading[str | None]:
    """Read a JSON string; None if it cannot be decoded."""
    yield from block.expects('"')
    text = '"'
    while True:
        piece, mark = yield from block.until('"', "\\")
        text += piece + mark
        if mark == '"':
            value = _decoded(text)
            return value if isinstance(value, str) else None
        escaped = yield from block.peek()
        text += block.take(len(escaped))


def _as_arguments(raw: str) -> str:
    """The JSON text of arguments that were not written as an object: JSON in a string is unpacked, null means none."""
    value = _decoded(raw)
    if isinstance(value, str):
        return value
    return "{}" if raw == "null" else raw


def _decoded(raw: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
