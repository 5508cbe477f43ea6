"""The values that a JSON schema lists: those that its other keywords allow, arrays of different ones, and anything."""

import math
from fractions import Fraction
from itertools import permutations
from typing import Any

import msgspec

from penstock.frontend.json_types import type_of
from penstock.parts.grammars.child.json_numbers import (
    FRACTION_DIGITS,
    MAX_INTEGER,
    MAX_NUMBER,
    allow_only,
    exact,
    fits,
)
from penstock.parts.grammars.child.json_parts import SAYS_NOTHING, has_combined, resolved
from penstock.parts.grammars.child.json_schema import Note, Schema, schemas_of, types_of

MAX_ARRAYS = 2000
"""Arrays of different values are listed if there are at most so many: all those of six values, in each order."""
LISTED_ITEMS = 36_000
"""Items of all arrays that are listed for one schema, each array one more, and a long item several: three times all
those of six values. The library cannot read twice as many.
"""

_LONG = 32
"""Characters of an item that counts as two."""
_MAX_VALUES = 400
"""Values of which arrays are made."""

_JUDGED = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength")
_ANY = "penstock-any"
_MAX_EXACT = 2**53


def settle_values(schema: Schema, note: Note) -> None:
    """Leave only those listed values that the schema's other keywords allow, and drop these keywords; in place."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return
    if "const" in schema and isinstance(schema.get("enum"), list):
        values = [value for value in values if _key(value) in {_key(each) for each in schema["enum"]}]
    values = [value for value in values if fits(value, schema)]
    kind = schema.get("type")
    for keyword in ("const", "enum", *_JUDGED):
        schema.pop(keyword, None)
    readable = [value for value in values if _is_readable(value)]
    if len(readable) == len(values):
        schema["enum"] = values
        return
    note("const or enum with numbers beyond 53 bits")
    around = [_around(value) for value in values if not _is_readable(value)]
    parts = [*([{"enum": readable}] if readable else []), *(each for each in around if each is not None)]
    if None not in around:
        others = schema.get("allOf")
        schema["allOf"] = [*(others if isinstance(others, list) else ()), {"anyOf": parts}]
    elif kind is not None:
        schema["type"] = kind


def list_unique_arrays(root: Schema, schema: Schema, room: int) -> int:
    """If few arrays have different items as a schema asks, list them; in place.

    Returns:
        What they take of the room, in items; 0 if there are none, or not enough room.
    """
    if schema.get("uniqueItems") is not True or "array" not in types_of(schema):
        return 0
    most = schema.get("maxItems", math.inf)
    least = schema.get("minItems", 0)
    if not isinstance(most, int | float) or not isinstance(least, int):
        return 0
    if most <= 1:
        del schema["uniqueItems"]
        return 0
    values = _values(resolved(root, schema.get("items")))
    if values is None or any(keyword in schema for keyword in ("prefixItems", "contains", "additionalItems")):
        return 0
    if len(values) > _MAX_VALUES:
        return 0
    lengths = range(max(0, least), int(min(most, len(values))) + 1)
    counts = {length: math.perm(len(values), length) for length in lengths}
    num_items = sum(length * count for length, count in counts.items())
    weight = 1 + sum(len(msgspec.json.encode(value)) // _LONG for value in values) / max(len(values), 1)
    num_arrays = sum(counts.values())
    taken = num_arrays + math.ceil(num_items * weight)
    if num_arrays > MAX_ARRAYS or taken > room:
        return 0
    for keyword in ("uniqueItems", "items", "minItems", "maxItems"):
        schema.pop(keyword, None)
    allow_only(schema, [list(each) for length in lengths for each in permutations(values, length)], {"array"})
    return taken


def bound_anything(root: Schema) -> bool:
    """Where a schema allows anything, allow numbers of bounded length only; in place. False if nothing is changed.

    Only where no schemas of arrays or objects are combined: the library would combine anything with everything.
    """
    if has_combined(root, {"array", "object"}) or _ANY in root.get("$defs", {}):
        return False
    anything = {"$ref": f"#/$defs/{_ANY}"}
    changed = False
    for schema in schemas_of(root):
        kinds = schema.get("type")
        if _allows_anything(schema):
            schema.update(anything)
        elif kinds in ("array", ["array"]) and not {"items", "prefixItems", "enum", "const"} & schema.keys():
            schema["items"] = dict(anything)
        elif kinds in ("object", ["object"]) and not {"additionalProperties", "enum", "const"} & schema.keys():
            schema["additionalProperties"] = dict(anything)
        else:
            for key in ("items", "additionalProperties"):
                if schema.get(key) is True:
                    schema[key] = dict(anything)
                    changed = True
            changed |= _bound_members(schema.get("properties"), anything)
            continue
        changed = True
        _bound_members(schema.get("properties"), anything)
    if changed:
        root.setdefault("$defs", {})[_ANY] = {
            "anyOf": [
                {"type": ["null", "boolean", "string"]},
                {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER},
                {
                    "type": "number",
                    "exclusiveMinimum": -MAX_NUMBER,
                    "exclusiveMaximum": MAX_NUMBER,
                    "multipleOf": float(Fraction(1, 10**FRACTION_DIGITS)),
                },
                {"type": "array", "items": dict(anything)},
                {"type": "object", "additionalProperties": dict(anything)},
            ]
        }
    return changed


def _bound_members(members: Any, anything: Schema) -> bool:
    found = [name for name, member in members.items() if member is True] if isinstance(members, dict) else []
    for name in found:
        members[name] = dict(anything)
    return bool(found)


def _allows_anything(schema: Schema) -> bool:
    return "type" not in schema and not schema.keys() - SAYS_NOTHING


def _values(schema: Any) -> list[Any] | None:
    """All values that a schema allows, each once; None if they are too many, or not simple."""
    if not isinstance(schema, dict) or schema.keys() - SAYS_NOTHING - {"enum", "const", "minimum", "maximum"}:
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None:
        match schema.get("type"):
            case "boolean":
                values = [False, True]
            case "integer" if {"minimum", "maximum"} <= schema.keys():
                low, high = exact(schema["minimum"]), exact(schema["maximum"])
                if low is None or high is None or high - low > _MAX_VALUES:
                    return None
                values = [*range(math.ceil(low), math.floor(high) + 1)]
    if not isinstance(values, list) or not all(_is_readable(value) for value in values):
        return None
    return list({_key(value): value for value in values if fits(value, schema)}.values())


def _key(value: Any) -> object:
    """What tells values apart: in JSON, 1 and 1.0 are equal, and 1 and true are not."""
    if (number := exact(value)) is not None:
        return number
    if isinstance(value, list):
        return ("list", *map(_key, value))
    if isinstance(value, dict):
        return ("dict", *sorted((key, repr(_key(member))) for key, member in value.items()))
    return type_of(value), msgspec.json.encode(value)


def _is_readable(value: Any) -> bool:
    """Whether all numbers of a value are exact as floats, which is how the library reads them."""
    if isinstance(value, list | dict):
        return all(map(_is_readable, value if isinstance(value, list) else value.values()))
    return type(value) is not int or abs(value) <= _MAX_EXACT or (abs(value) < 2**63 and int(float(value)) == value)


def _around(value: Any) -> Schema | None:
    """The numbers nearest to one that cannot be read; None if there are none either."""
    if type(value) is not int or abs(value) > MAX_INTEGER:
        return None
    near = float(value)
    least, most = int(math.nextafter(near, -math.inf)), int(math.nextafter(near, math.inf))
    return {"type": "integer", "minimum": max(least, -MAX_INTEGER), "maximum": min(most, MAX_INTEGER)}
