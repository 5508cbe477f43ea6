"""Turns a JSON schema into one that can be enforced token by token: removes what cannot be enforced, and records it.

A finished text is checked against the whole schema at the end (`json_check.py`) if anything was removed. The grammar
library ignores keywords that it does not know, and reports them; this file handles what the library would reject or
misread. Numbers and formats get bounds (`json_numbers.py`, `json_texts.py`), objects are closed (`json_parts.py`), and
listed values are those that fit (`json_values.py`). What the library still cannot read is left out where it stands
(`json_repair.py`).
"""

import re
from collections.abc import Iterable

from penstock.parts.grammars.child.json_numbers import bound_numbers
from penstock.parts.grammars.child.json_parts import close_objects, combined
from penstock.parts.grammars.child.json_schema import Note, Schema, schemas_of
from penstock.parts.grammars.child.json_texts import bound_texts
from penstock.parts.grammars.child.json_values import LISTED_ITEMS, list_unique_arrays, settle_values

MAX_PATTERN_PROPERTIES = 64
"""Limit for patterns of properties: all pairs of them are compared."""

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_PROPERTY_COUNTS = ("minProperties", "maxProperties")
_UNREADABLE = re.compile(r"\(\?<?[=!]|\(\?P?[=>]|(?<!\\)(?:\\\\)*\\[bB1-9k]")
"""What no automaton can match: look-around, word boundaries, and back-references."""


def superset_of(root: Schema, note: Note, *, open_objects: bool = False) -> None:
    """Rewrite a schema, in place, so that the library can enforce it; `note` is told of each keyword that it cannot.

    `open_objects`: objects may have properties beside those that the schema lists, as the standard says.
    """
    for schema in schemas_of(root):
        _tidy(schema)
        _relax(schema, note)
    if not open_objects:
        close_objects(root, note)
    for schema in schemas_of(root):
        least, needed = schema.get("minProperties"), schema.get("required")
        if isinstance(least, int) and least > (len(needed) if isinstance(needed, list) else 0):
            note("minProperties")  # a free key may be written twice, and count once
    of_others = combined(root)
    for schema in schemas_of(root):
        settle_values(schema, note)
        bound_numbers(schema, note, is_combined=id(schema) in of_others)
        bound_texts(schema)
    room = LISTED_ITEMS
    for schema in schemas_of(root):
        room -= list_unique_arrays(root, schema, room)


def notes_of(warnings: Iterable[str], note: Note) -> None:
    """Map the library's own warnings to keywords. Formats that it does not know are treated as annotations."""
    for warning in warnings:
        if found := re.match(r"Unimplemented keys: (\[.*?\])", warning):
            for keyword in re.findall(r'"([^"]*)"', found[1]):
                note(keyword)
        elif warning.startswith("oneOf"):
            note("oneOf")
        elif "min/maxProperties" in warning:
            note("minProperties or maxProperties")
        elif not warning.startswith("Unknown format"):
            note(warning[:100])


def _tidy(schema: Schema) -> None:
    """Rewrite parts of a schema into equivalent ones that the library supports; drop meaningless ones."""
    for keyword in _COUNTS:
        count = schema.get(keyword)
        if isinstance(count, float) and count.is_integer():
            schema[keyword] = int(count)
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("propertyNames") in (True, {}, {"type": "string"}):
        del schema["propertyNames"]
    if schema.get("not") in (False, []):
        del schema["not"]
    if "if" not in schema or not ("then" in schema or "else" in schema):
        for keyword in ("if", "then", "else"):
            schema.pop(keyword, None)
    if "contains" not in schema:
        for keyword in ("minContains", "maxContains"):
            schema.pop(keyword, None)
    for keyword in ("unevaluatedProperties", "unevaluatedItems"):
        if schema.get(keyword) in (True, {}):
            del schema[keyword]


def _relax(schema: Schema, note: Note) -> None:
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _UNREADABLE.search(pattern):
        del schema["pattern"]
        note("pattern with look-around, word borders or back-references")
    named = schema.get("patternProperties")
    if isinstance(named, dict) and (len(named) > MAX_PATTERN_PROPERTIES or any(map(_UNREADABLE.search, named))):
        _drop(schema, ("patternProperties", "additionalProperties"), note)
    # The library counts properties only if none is optional.
    counts = [schema[keyword] for keyword in _PROPERTY_COUNTS if isinstance(schema.get(keyword), int)]
    if any(counts) and _has_optional_properties(schema):
        _drop(schema, _PROPERTY_COUNTS, note)


def _has_optional_properties(schema: Schema) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    named = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return isinstance(properties, dict) and not properties.keys() <= set(named)


def _drop(schema: Schema, keywords: tuple[str, ...], note: Note) -> bool:
    dropped = [keyword for keyword in keywords if keyword in schema]
    for keyword in dropped:
        del schema[keyword]
        note(keyword)
    return bool(dropped)
