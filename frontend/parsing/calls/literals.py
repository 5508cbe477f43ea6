"""Values written as literals of a programming language, read as they grow and written as JSON.

A `Notation` says how: with Python's quotes and words, or with a model's own marks around strings.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.rules import Rules, listed, quoted
from penstock.frontend.parsing.calls.values import OF_OBJECTS, json_text, required, resolved

Write = Callable[[str], None]

_MAX_DEPTH = 64
_BY_TYPE = OF_OBJECTS | {"items"}
"""Keywords that are enforced in a schema which names its types."""
_BY_CHOICE = _BY_TYPE | {"enum", "const", "anyOf", "oneOf"}
"""Keywords of which nothing is left to enforce in a schema that lists its values."""
_WORD = re.compile(r"[^\s,:=(){}\[\]]{0,512}")
_SAME_IN_JSON = frozenset('"\\/bfnrt')
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = {kind: re.compile(rf"[0-9A-Fa-f]{{0,{count}}}") for kind, count in _HEX_DIGITS.items()}
_CONTROLS = {"a": "\\u0007", "v": "\\u000b", "0": "\\u0000"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
_AFTER_STRING = (",", ")", "]", "}", ":")


@dataclass(frozen=True, slots=True)
class Notation:
    """How strings, keys and words are written."""

    quotes: tuple[str, ...]
    has_escapes: bool
    """Whether a backslash in a string begins an escape."""
    has_bare_keys: bool
    """Whether keys of objects are written without quotes, in alphabetical order."""
    words: tuple[str, str, str]
    """True, false and null, as grammars let the model write them."""


PYTHON = Notation(("'", '"'), has_escapes=True, has_bare_keys=False, words=("True", "False", "None"))


def read_value(block: Block, write: Write, notation: Notation, depth: int = 0) -> Reading[None]:
    """Read one value and write it as JSON.

    Raises:
        NoCallError: if it is not a value.
    """
    yield from block.skip()
    quote = yield from block.accepts(*notation.quotes)
    if quote:
        yield from _read_string(block, write, quote, notation)
        return
    opening = yield from block.peek()
    if depth > _MAX_DEPTH:
        raise NoCallError
    if opening in ("[", "("):
        block.take(1)
        write("[")
        yield from _read_items(block, write, notation, "]" if opening == "[" else ")", depth)
        write("]")
    elif opening == "{":
        block.take(1)
        write("{")
        yield from read_members(block, write, notation, depth)
        write("}")
    else:
        word = yield from block.word(_WORD)
        yield from block.goes_on()  # the text has ended, perhaps within the word
        if not word:
            raise NoCallError
        write(word_as_json(word))


def _read_items(block: Block, write: Write, notation: Notation, end: str, depth: int) -> Reading[None]:
    is_first = True
    while True:
        yield from block.skip()
        if (yield from block.accepts(end)):
            return
        if not is_first:
            yield from block.expects(",")
            yield from block.skip()
            if (yield from block.accepts(end)):
                return
            write(", ")
        is_first = False
        yield from read_value(block, write, notation, depth + 1)


def read_members(block: Block, write: Write, notation: Notation, depth: int = 0) -> Reading[None]:
    """Read an object after its brace, and write it as JSON without braces."""
    is_first = True
    while True:
        yield from block.skip(" \t\r\n,")
        if (yield from block.accepts("}")):
            return
        yield from block.goes_on()
        if not is_first:
            write(", ")
        is_first = False
        yield from _read_key(block, write, notation)
        write(": ")
        yield from read_value(block, write, notation, depth + 1)


def _read_key(block: Block, write: Write, notation: Notation) -> Reading[None]:
    """Read an object's key and its colon, and write the key as JSON."""
    quote = yield from block.accepts(*notation.quotes)
    if quote:
        yield from _read_string(block, write, quote, notation)
        yield from block.skip()
        yield from block.expects(":")
    else:
        key, _ = yield from block.until(":")
        write(json_text(key.strip()))


def _read_string(block: Block, write: Write, quote: str, notation: Notation) -> Reading[None]:
    write('"')

    def text(piece: str) -> None:
        write(json_text(piece)[1:-1])

    if not notation.has_escapes:
        yield from block.until(quote, then=_AFTER_STRING, each=text)
        write('"')
        return
    while True:
        # A quote counts as the string's end only if the notation continues after it: not every template escapes quotes.
        _, found = yield from block.until(quote, then=_AFTER_STRING, free="\\", each=text)
        if found == quote:
            break
        yield from _read_escape(block, write)
    write('"')


def _read_escape(block: Block, write: Write) -> Reading[None]:
    """Read what follows a backslash, and write its meaning as JSON."""
    kind = yield from block.peek()
    yield from block.goes_on()
    block.take(1)
    if kind in _SAME_IN_JSON:
        write("\\" + kind)
    elif kind == "'":
        write("'")
    elif kind in _HEX:
        digits = yield from block.word(_HEX[kind])
        # Without its digits it is no escape: models write paths, such as C:\users, with single backslashes.
        code = int(digits, 16) if len(digits) == _HEX_DIGITS[kind] else sys.maxunicode + 1
        if code < 0x10000:
            write(f"\\u{code:04x}")
        else:
            write(chr(code) if code <= sys.maxunicode else f"\\\\{kind}{digits}")
    elif kind in _CONTROLS:
        write(_CONTROLS[kind])
    elif kind != "\n":
        write("\\\\" + json_text(kind)[1:-1])


def word_as_json(word: str) -> str:
    """The JSON of a number or a known word; any other word is a string without quotes."""
    if word in _WORDS:
        return _WORDS[word]
    for text in (word, word.replace("_", "")):
        try:
            if not isinstance(msgspec.json.decode(text), str):
                return text
        except (msgspec.DecodeError, UnicodeError):
            pass
    try:
        return repr(float(word)) if float(word) - float(word) == 0 else json_text(word)
    except ValueError:
        return json_text(word)


def literal_rule(rules: Rules, schema: Any, root: Any, notation: Notation, depth: int = 0) -> str:
    """The grammar of a value; constraints that the notation has no rule for are left out."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if isinstance(reference, str):
        target = resolved(schema, root)
        rules.leave_out(schema, frozenset({"$ref"} if target else ()))
        return rules.recursive(
            f"{notation.quotes} {reference}", lambda _: literal_rule(rules, target, root, notation, depth), root
        )
    schema = schema if isinstance(schema, dict) else {}
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices and not any(isinstance(choice, list | dict) for choice in choices):
        rules.leave_out(schema, _BY_CHOICE)
        return f"({' | '.join(_choice(rules, choice, notation) for choice in choices)})"
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and schema[name] and depth < _MAX_DEPTH:
            rules.leave_out(schema, frozenset({name}))
            parts = [literal_rule(rules, part, root, notation, depth + 1) for part in schema[name]]
            return f"({' | '.join(parts)})"
    return _typed_rule(rules, schema, root, notation, depth)


def _typed_rule(rules: Rules, schema: dict[str, Any], root: Any, notation: Notation, depth: int) -> str:
    """The grammar of a value of the types that a schema names; of any value if it names none."""
    true, false, null = notation.words
    said = schema.get("type")
    kinds = said if isinstance(said, list) and said else [said]
    rules.leave_out(schema, _BY_TYPE)
    found = []
    for kind in kinds:
        match kind:
            case "string":
                found.append(_string_rule(rules, notation))
            case "integer":
                found.append(rules.terminal(r"/-?(0|[1-9][0-9]*)/"))
            case "number":
                found.append(rules.terminal(_NUMBER))
            case "boolean":
                found.append(f'("{true}" | "{false}")')
            case "null":
                found.append(f'"{null}"')
            case "array" if depth < _MAX_DEPTH:
                item = literal_rule(rules, schema.get("items") or {}, root, notation, depth + 1)
                found.append(rules.rule(f'"[" ({item} ({quoted(_comma(notation))} {item})*)? "]"'))
            case "object" if depth < _MAX_DEPTH:
                found.append(_object_rule(rules, schema, root, notation, depth))
            case _:
                rules.leave_out(schema)
                return _any_rule(rules, notation)
    return f"({' | '.join(found)})"


def members(schema: dict[str, Any], notation: Notation) -> list[tuple[str, Any, bool]]:
    """An object's keys in the order in which they are written, their schemas, and whether they are required."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    needed = required(schema)
    keys = sorted(properties) if notation.has_bare_keys else properties
    return [(key, properties[key], key in needed) for key in keys]


def is_open(schema: dict[str, Any]) -> bool:
    """Whether the schema is of an object whose keys it does not name."""
    return not schema.get("properties") and schema.get("additionalProperties") is not False


def _object_rule(rules: Rules, schema: dict[str, Any], root: Any, notation: Notation, depth: int) -> str:
    if is_open(schema):
        rules.leave_out_of_open(schema)
        value = _any_rule(rules, notation)
        member = f"{_key_rule(rules, None, notation)} {value}"
        return rules.rule(f'"{{" ({member} ({quoted(_comma(notation))} {member})*)? "}}"')
    items = [
        (f"{_key_rule(rules, key, notation)} {literal_rule(rules, part, root, notation, depth + 1)}", is_needed)
        for key, part, is_needed in members(schema, notation)
    ]
    return rules.rule(f'"{{" {listed(rules, items, _comma(notation))} "}}"')


def _comma(notation: Notation) -> str:
    return "," if notation.has_bare_keys else ", "


def _key_rule(rules: Rules, key: str | None, notation: Notation) -> str:
    if notation.has_bare_keys:
        return quoted(f"{key}:") if key is not None else rules.terminal(r"/[A-Za-z0-9_.\-]+:/")
    return quoted(json_text(key) + ": ") if key is not None else rules.terminal(r'/"[A-Za-z0-9_.\-]+": /')


def _choice(rules: Rules, value: Any, notation: Notation) -> str:
    true, false, null = notation.words
    match value:
        case str() if notation.has_escapes:
            return f"({quoted(json_text(value))} | {quoted(repr(value))})"
        case str():
            mark = rules.mark(notation.quotes[0])
            return f"({mark} {quoted(value)} {mark})" if value else f"({mark} {mark})"
        case bool():
            return f'"{true if value else false}"'
        case None:
            return f'"{null}"'
    return quoted(json_text(value))


def _string_rule(rules: Rules, notation: Notation) -> str:
    if not notation.has_escapes:
        mark = notation.quotes[0]
        return rules.rule(f"{rules.mark(mark)} {rules.text_until(mark)}")
    inner = r"\\[\\\"'nrtbf\/]|\\u[0-9a-fA-F]{4}"
    double, single = rf'"([^"\\\n]|{inner})*"', rf"'([^'\\\n]|{inner})*'"
    return rules.terminal(f"/{double}|{single}/")


def _any_rule(rules: Rules, notation: Notation) -> str:
    """The grammar of any value: a rule that refers to itself."""

    def body(name: str) -> str:
        true, false, null = notation.words
        member = f"{_key_rule(rules, None, notation)} {name}"
        comma = quoted(_comma(notation))
        return " | ".join(
            [
                _string_rule(rules, notation),
                rules.terminal(_NUMBER),
                f'"{true}" | "{false}" | "{null}"',
                f'"[" ({name} ({comma} {name})*)? "]"',
                f'"{{" ({member} ({comma} {member})*)? "}}"',
            ]
        )

    return rules.recursive(f"any {notation.quotes}", body)
