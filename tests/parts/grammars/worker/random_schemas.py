"""Random JSON schemas whose texts are bounded: nested objects, arrays, enums, numbers, patterns, references."""

import random
from typing import Any

Schema = dict[str, Any]

_PATTERNS = ["^[a-c]{1,4}$", "^[0-9]{3}-[0-9]{2}$", "^(red|green|blue)$", "^x[A-Z]?y{0,2}$", "^[é-ü]{1,3}$"]
_FORMATS = ["date", "ipv4", "uuid"]  # where the validator is as strict as the standard
_VALUES: list[Any] = ["a", 'quote "q"', "back\\slash", "é€", "", 0, -7, 3.5, True, False, None, [1, "x"], {"k": [None]}]


def random_schema(seed: int) -> Schema:
    """The schema of this number; some have definitions that others in it refer to."""
    draw = random.Random(seed)
    definitions = {f"d{i}": _schema(draw, 1, ()) for i in range(draw.randint(0, 2))}
    schema = _schema(draw, 0, tuple(definitions))
    if definitions:
        schema["$defs"] = definitions
    return schema


def _schema(draw: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    if depth and definitions and draw.random() < 0.25:
        return {"$ref": f"#/$defs/{draw.choice(definitions)}"}
    simple = [_string, _integer, _number, _enum, _plain]
    nested = [_object, _array, _any_of] * (3 if depth == 0 else 1 if depth < 3 else 0)
    choice = draw.randrange(len(simple) + len(nested))
    if choice < len(simple):
        return simple[choice](draw)
    return nested[choice - len(simple)](draw, depth, definitions)


def _object(draw: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    names = draw.sample(["a", "name", "two words", "ünï", 'q"', "x_1"], draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _schema(draw, depth + 1, definitions) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    least = draw.randint(0, 2)
    schema: Schema = {"type": "array", "minItems": least, "maxItems": least + draw.randint(0, 2)}
    if draw.random() < 0.2:
        schema["prefixItems"] = [_schema(draw, depth + 1, definitions)]
    return schema | {"items": _schema(draw, depth + 1, definitions)}


def _any_of(draw: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    return {"anyOf": [_schema(draw, depth + 1, definitions) for _ in range(draw.randint(1, 3))]}


def _string(draw: random.Random) -> Schema:
    match draw.randint(0, 2):
        case 0:
            return {"type": "string", "pattern": draw.choice(_PATTERNS)}
        case 1:
            return {"type": "string", "format": draw.choice(_FORMATS)}
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 6)}


def _integer(draw: random.Random) -> Schema:
    low = draw.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)}


def _number(draw: random.Random) -> Schema:
    low = round(draw.uniform(-50, 50), 2)
    upper = draw.choice(["maximum", "exclusiveMaximum"])
    return {"type": "number", "minimum": low, upper: low + draw.randint(1, 100)}


def _enum(draw: random.Random) -> Schema:
    if draw.random() < 0.2:
        return {"const": draw.choice(_VALUES)}
    return {"enum": draw.sample(_VALUES, draw.randint(1, 4))}


def _plain(draw: random.Random) -> Schema:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}
