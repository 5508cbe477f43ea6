"""Turns a JSON schema into one that can be enforced token by token: removes what cannot be enforced, and records it.

Removing a constraint only ever allows more texts, so every text that the schema allows can be written. A finished text
is checked against the whole schema at the end (`json_check.py`). The grammar library ignores keywords that it does not
know, and reports them; this file handles what the library would reject.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

from penstock.frontend.grammars.json_schema import Schema, schemas_of

MAX_MULTIPLE = 10_000
"""A divisor's automaton has about this many states: 30 ms to build, 5 MB."""

MAX_PATTERN_PROPERTIES = 64
"""Limit for patterns of properties: all pairs of them are compared."""

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_PROPERTY_COUNTS = ("minProperties", "maxProperties")
_UNREADABLE = re.compile(r"\(\?<?[=!]|\(\?P?[=>]|(?<!\\)(?:\\\\)*\\[bB1-9k]")
"""What no automaton can match: look-around, word boundaries, and back-references."""

Note = Callable[[str], None]


def superset_of(root: Schema, note: Note) -> None:
    """Remove what cannot be enforced from a schema, in place; `note` is called at least once for each such keyword."""
    for schema in schemas_of(root):
        _tidy(schema)
        _relax(schema, note)


def fallbacks(root: Schema, note: Note) -> Iterator[None]:
    """Remove more and more, in place, one step at a time; go on as long as the library rejects the rest."""
    steps: tuple[tuple[str, ...], ...] = (
        ("patternProperties", "additionalProperties", "minProperties", "maxProperties"),
        ("pattern", "multipleOf"),
        ("allOf",),
        ("anyOf", "oneOf", "$ref"),
    )
    for keywords in steps:
        if _drop_everywhere(root, keywords, note):
            yield
    kept = {"type": root["type"]} if "type" in root else {}
    root.clear()
    root.update(kept)
    note("all of it but its type")
    yield


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
    divisor = schema.get("multipleOf")
    if isinstance(divisor, int | float) and not isinstance(divisor, bool) and _states(divisor) > MAX_MULTIPLE:
        _drop(schema, ("multipleOf",), note)


def _has_optional_properties(schema: Schema) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    named = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return isinstance(properties, dict) and not properties.keys() <= set(named)


def _states(divisor: float) -> float:
    """About how many states are needed to track a number's remainder: for powers of ten, the last digits suffice."""
    if not divisor or divisor in (float("inf"), float("-inf")):
        return 0
    size = abs(Fraction(str(divisor)).numerator)
    return len(str(size)) if str(size).strip("0") == "1" and size < 10**18 else size


def _drop_everywhere(root: Schema, keywords: tuple[str, ...], note: Note) -> bool:
    dropped = [_drop(schema, keywords, note) for schema in schemas_of(root)]
    return any(dropped)


def _drop(schema: Schema, keywords: tuple[str, ...], note: Note) -> bool:
    dropped = [keyword for keyword in keywords if keyword in schema]
    for keyword in dropped:
        del schema[keyword]
        note(keyword)
    return bool(dropped)
