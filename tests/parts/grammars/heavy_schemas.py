"""A family of schemas and grammars at the limits: each is legal in size, and made to be slow somewhere."""

import json
from collections.abc import Callable, Iterator
from typing import Any

MAX_BYTES = 65_536


def _filled(make: Callable[[int], Any], most: int = 10_000) -> Any:
    """The largest of these that a request may hold."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(json.dumps(make(middle))) <= MAX_BYTES else (low, middle - 1)
    return make(low)


def _nested(depth: int, keyword: str) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {keyword: [schema] if keyword.endswith("Of") else schema}
    return schema


def _chain(length: int) -> Any:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def heavy_schemas() -> Iterator[tuple[str, Any]]:
    """By name."""
    yield "enum", _filled(lambda n: {"enum": [f"value {i * 7919}" for i in range(n)]})
    yield "numbers", _filled(lambda n: {"enum": [i * 1_000_003 for i in range(n)]})
    yield "properties", _filled(lambda n: {"properties": {f"p{i}": {"minLength": i} for i in range(n)}}, 4000)
    yield (
        "required",
        _filled(lambda n: {"properties": {f"p{i}": {} for i in range(n)}, "required": [f"p{n - 1}"]}, 4000),
    )
    yield "patternProperties", {"patternProperties": {f"^a{i}[a-z]+x{i}$": {} for i in range(150)}}
    yield "many patternProperties", _filled(lambda n: {"patternProperties": {f"a{i}.*x": {} for i in range(n)}}, 4000)
    yield (
        "patterns",
        _filled(
            lambda n: {
                "properties": {f"p{i}": {"type": "string", "pattern": f"(a|b){{1,{i + 9}}}c"} for i in range(n)}
            },
            900,
        ),
    )
    yield "overlap", {"allOf": [{"type": "string", "pattern": f".*{c}.{{12}}{c}.*"} for c in "abcdefgh"]}
    yield "divisors", {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949)]}
    yield "large divisor", {"type": "integer", "multipleOf": 999_983}
    yield "minItems", {"type": "array", "items": {"type": "string", "minLength": 9}, "minItems": 10**9}
    yield "lengths", {"type": "string", "minLength": 10**7, "maxLength": 10**9}
    yield "bounds", {"type": "number", "minimum": 0.000_000_123_456_789, "maximum": 1e308}
    yield "anyOf", _filled(lambda n: {"anyOf": [{"properties": {f"a{i}": {"const": i}}} for i in range(n)]}, 1500)
    yield "oneOf", _filled(lambda n: {"oneOf": [{"properties": {f"a{i}": {"const": i}}} for i in range(n)]}, 1500)
    yield "allOf", _filled(lambda n: {"allOf": [{"properties": {f"a{i}": {"minLength": i}}} for i in range(n)]}, 1500)
    for keyword in ("items", "not", "anyOf", "allOf"):
        yield f"deep {keyword}", _nested(31, keyword)
        yield f"too deep {keyword}", _nested(900, keyword)
    yield "chain", _chain(900)
    yield (
        "doubling",
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"anyOf": [{"items": {"$ref": f"#/$defs/d{i + 1}"}}] * 2} for i in range(60)}
            | {"d60": {}},
        },
    )
    yield (
        "multiplied",
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
            | {"d40": {"minimum": 1}},
        },
    )
    yield (
        "recursive",
        {
            "type": "array",
            "items": {"anyOf": [{"$ref": "#"}, {"type": "object", "additionalProperties": {"$ref": "#"}}]},
        },
    )
