"""Arguments that a model writes one by one as plain text, typed by the tool's JSON schema."""

import ast
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.frontend.json_types import type_of
from penstock.frontend.parsing.calls.block import Block, Kinds, Reading
from penstock.frontend.parsing.calls.rules import Rules, quoted
from penstock.frontend.patterns import unanchored

_MAX_DEPTH = 8
_ANYTHING: dict[str, Any] = {}
"""The schema of anything: always the same object, because schemas are told apart by their ids."""
_PARTS = ("anyOf", "oneOf", "allOf")
_OF_TEXTS = frozenset({"type", *_PARTS})
"""Keywords that can be enforced for a text between tags: of several types it may have any."""
OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
"""Keywords that can be enforced for an object."""
_KINDS = ("array", "boolean", "integer", "null", "number", "object", "string")


class ArgumentWriter:
    """Writes a call's arguments as a JSON object, one after the other."""

    def __init__(self, block: Block, schema: Any) -> None:
        """`schema` describes the whole object."""
        self._block = block
        self._schema = schema
        self._is_empty = True

    def key(self, key: str) -> None:
        """An argument begins."""
        self._block.add(("{" if self._is_empty else ", ") + json_text(key) + ": ")
        self._is_empty = False

    def raw(self, text: str) -> None:
        """A piece of the argument's value, as JSON."""
        self._block.add(text)

    def string(self, text: str) -> None:
        """A piece of a string's text."""
        self._block.add(json_text(text)[1:-1])

    def value(
        self, key: str, *ends: str, then: tuple[str, ...] = (), kinds: frozenset[str] | None = None
    ) -> Reading[None]:
        """Read an argument's text up to one of `ends`, and write it with the type that the schema gives it.

        A string is passed on as it comes, anything else once it is complete. `kinds` overrides the schema.
        """
        kinds = kinds_of(self._schema, key, self._block.kinds) if kinds is None else kinds
        self.key(key)
        if kinds == {"string"}:
            self.raw('"')
            yield from self._block.until(*ends, then=then, each=self.string)
            self.raw('"')
        else:
            text, _ = yield from self._block.until(*ends, then=then)
            self.raw(as_json(text, kinds))

    def close(self) -> None:
        """There are no more arguments."""
        self._block.add("{}" if self._is_empty else "}")
        self._block.end_call()


def json_text(value: Any) -> str:
    """A value as compact JSON."""
    return msgspec.json.encode(value).decode()


def as_json(text: str, kinds: frozenset[str]) -> str:
    """A value's text as JSON of one of these kinds; if there are none, of the kind that it seems to have."""
    written = text.strip()
    value, kind = _decoded(written)
    if kind and (kind in kinds or (kind == "integer" and "number" in kinds)):
        return value
    if "string" in kinds or kind in ("", "string"):
        return json_text(text)
    return value


def _decoded(text: str) -> tuple[str, str]:
    """JSON text and its kind; Python literals are understood too. Two empty texts if it is neither."""
    try:
        return text, type_of(msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        pass
    if text[:1] in ("[", "{", "(") or text in ("True", "False", "None"):
        try:
            value = ast.literal_eval(text)
            return json_text(value), type_of(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, UnicodeError):
            pass
    return "", ""


def property_schema(schema: Any, key: str) -> Any:
    """The schema of an argument; an empty object if there is none."""
    schema = resolved(schema, schema)
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    more = schema.get("additionalProperties")
    return more if isinstance(more, dict) else _ANYTHING


def required(schema: dict[str, Any]) -> set[str]:
    """The keys that an object must have."""
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """The schema, or the one that it refers to within `root`; an empty object if that cannot be found."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict):
            return _ANYTHING
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for name in reference.removeprefix("#").strip("/").split("/"):
            if name:
                name = name.replace("~1", "/").replace("~0", "~")
                schema = schema.get(name) if isinstance(schema, dict) else None
    return _ANYTHING


def kinds_of(schema: Any, key: str, known: Kinds | None = None) -> frozenset[str]:
    """The JSON types that an argument may have; empty if the schema does not say."""
    return frozenset(_kinds(property_schema(schema, key), schema, 0, {} if known is None else known))


def _kinds(schema: Any, root: Any, depth: int, known: Kinds) -> set[str]:
    schema = resolved(schema, root)
    place = id(schema), depth
    if place not in known:
        known[place] = _kinds_said(schema, root, depth, known)
    return known[place]


def _kinds_said(schema: dict[str, Any], root: Any, depth: int, known: Kinds) -> set[str]:
    said = schema.get("type")
    if isinstance(said, str | list):
        return {kind for kind in ([said] if isinstance(said, str) else said) if kind in _KINDS}
    if isinstance(schema.get("enum"), list):
        return {type_of(value) for value in schema["enum"]}
    if "const" in schema:
        return {type_of(schema["const"])}
    found: set[str] = set()
    if depth < _MAX_DEPTH:
        for name in _PARTS:
            parts = schema.get(name)
            for part in parts if isinstance(parts, list) else ():
                kinds = _kinds(part, root, depth + 1, known)
                if not kinds and name != "allOf":
                    return set()
                found |= kinds
    if not found and "properties" in schema:
        found = {"object"}
    return found


def _leave_out_of_text(rules: Rules, schema: Any, root: Any) -> None:
    """Note what is not enforced for a text between tags, in the schema or in one that it is made of."""
    waiting = [schema]
    while waiting:
        given = waiting.pop()
        part = resolved(given, root)
        if isinstance(given, dict) and part is not given:
            rules.leave_out(given, frozenset({"$ref"} if part else ()))
        if id(part) not in rules.seen:
            rules.seen.add(id(part))
            rules.leave_out(part, _OF_TEXTS)
            waiting += (each for name in _PARTS if isinstance(part.get(name), list) for each in part[name])


def _one_of(choices: list[Any]) -> str:
    """The grammar of these values as texts."""
    return " | ".join(quoted(value if isinstance(value, str) else json_text(value)) for value in choices)


def _value_rule(
    rules: Rules, schema: Any, key: str, end: str, then: str = "", before: str = "", then_mark: str = ""
) -> str:
    """The grammar of an argument's text and its end mark, with the text around that mark."""
    kinds = kinds_of(schema, key, rules.kinds)
    said = property_schema(schema, key)
    plain = resolved(said, schema)
    closing = " ".join([*([quoted(before)] if before else []), rules.mark(end), *([quoted(then)] if then else [])])
    last = f" {rules.mark(then_mark)}" if then_mark else ""
    choices = plain.get("enum") if isinstance(plain.get("enum"), list) else None
    choices = [plain["const"]] if "const" in plain else choices
    if choices:
        return f"{rules.recursive('choices', lambda _: _one_of(choices), plain)} {closing}{last}"
    if "string" in kinds or not kinds:
        is_held = kinds == {"string"} and said is plain and isinstance(plain.get("pattern"), str)
        pattern = unanchored(plain["pattern"]) if is_held else ""
        if pattern and (text := rules.text_like(pattern, end, then, before)):
            rules.leave_out(plain, _OF_TEXTS | {"pattern"})
            return text + last
        _leave_out_of_text(rules, said, schema)
        return rules.text_until(end, then, before) + last
    said = said if isinstance(said, dict) else {}
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return f"{rules.json({**definitions, **said}, {})} {closing}{last}"


def arguments_rule(
    rules: Rules,
    schema: Any,
    opening: str,
    key_end: Callable[[frozenset[str] | None], str],
    end: str,
    then: str = "",
    before: str = "",
    then_mark: str = "",
) -> str:
    """The grammar of arguments, each with its marks, in the order of the schema.

    Args:
        opening: the text before a key.
        key_end: returns the expression between a key and its value for the value's kinds; None for any.
        end: the mark after a value.
        then: text after that mark.
        before: text before it.
        then_mark: a mark after `then`.
    """
    plain = resolved(schema, schema)
    rules.leave_out(plain, OF_OBJECTS)
    properties = plain.get("properties")
    if not isinstance(properties, dict) or not properties:
        rules.leave_out_of_open(plain)
        if plain.get("additionalProperties") is False:
            return ""
        last = f" {rules.mark(then_mark)}" if then_mark else ""
        return f"({opening} /[A-Za-z0-9_.\\-]+/ {key_end(None)} {rules.text_until(end, then, before)}{last})*"
    needed = required(plain)
    parts = []
    for key in properties:
        between = key_end(kinds_of(schema, key, rules.kinds))
        part = f"{opening} {quoted(key)} {between} {_value_rule(rules, schema, key, end, then, before, then_mark)}"
        parts.append(part if key in needed else f"({part})?")
    return " ".join(parts)
