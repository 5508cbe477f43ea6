"""Checks of a JSON schema before the grammar library sees it: its size, references, patterns, and termination.

Runs in the process that parses grammars (`read.py`), because a client's schema may make any of these checks slow.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from penstock.parts.grammars.limits import MAX_PATTERN_CHARACTERS

MAX_DEPTH = 64
MAX_VALUES = 10_000
MAX_PATTERN_REPEATS = 10_000
"""Limit for the characters of a pattern with its counted repetitions written out: `(ab){10}` has 20."""

_VERBOSE = re.compile(r"\(\?[A-Za-z-]*x")
"""The flag with which blanks and comments in a pattern mean nothing."""
_LARK = re.compile(r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/([a-z]*)', re.DOTALL)
"""A string, a comment, or a pattern with its flags."""
_BOUNDS = re.compile(r"\{([^{}]*)\}")

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


class GrammarError(ValueError):
    """What is wrong with a grammar, in words for the client."""


Schema = dict[str, Any]

Note = Callable[[str], None]
"""Is told the keyword, or in a few words what, that cannot be enforced while a text is written."""


def check_schema(root: Any) -> None:
    """Check a schema, already parsed.

    Raises:
        GrammarError: with the limit and the value, or what is not supported.
    """
    if not isinstance(root, dict):
        raise GrammarError("a schema must be an object")
    _check_size(root)
    schemas = schemas_of(root)
    for schema in schemas:
        _check_keywords(schema)
    if not _has_end(root, schemas):
        raise GrammarError("no finite text matches it: it refers to itself without end")


def check_pattern(pattern: str) -> None:
    """Check a regular expression's length and its counted repetitions.

    Raises:
        GrammarError: with the limit and the value.
    """
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise GrammarError(f"a pattern may have at most {MAX_PATTERN_CHARACTERS} characters, got {len(pattern)}")
    _check_written_out(pattern, is_verbose=_VERBOSE.search(pattern) is not None)


def check_repetitions(grammar: str) -> None:
    """Check the counted repetitions of all patterns in a grammar's text.

    Raises:
        GrammarError: with the limit and the value.
    """
    is_verbose = _VERBOSE.search(grammar) is not None or any("x" in flags for flags in _LARK.findall(grammar))
    _check_written_out(grammar, is_verbose=is_verbose)


def _check_written_out(text: str, *, is_verbose: bool) -> None:
    """`is_verbose`: blanks and comments may hide what is repeated, so it is taken to be everything."""
    # Measured twice: within quotes, as in grammars, a bracket does not begin a set.
    size = max(_written_out(text), _written_out(text.replace("[", " ")))
    if is_verbose:
        counts = map(_count, _BOUNDS.findall(text))
        size = max(size, len(text) * prod(count for count in counts if count))
    if size > MAX_PATTERN_REPEATS:
        raise GrammarError(
            f"a pattern may have at most {MAX_PATTERN_REPEATS} characters with its repetitions written out, got {size}"
        )


def _check_size(root: Any) -> None:
    level, depth, num_values = [root], 0, 0
    while level:
        depth += 1
        num_values += len(level)
        if depth > MAX_DEPTH:
            raise GrammarError(f"a schema may be at most {MAX_DEPTH} levels deep")
        if num_values > MAX_VALUES:
            raise GrammarError(f"a schema may hold at most {MAX_VALUES} values")
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]


def types_of(schema: Schema) -> frozenset[str]:
    """The JSON types that a schema names; all of them if it names none."""
    said = schema.get("type", list(TYPES))
    names = [said] if isinstance(said, str) else said if isinstance(said, list) else ()
    return TYPES.intersection(name for name in names if isinstance(name, str))


def schemas_of(root: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema and all schemas in it, outer ones first, without property names and example values.

    The target of a reference is a schema, wherever it is.
    """
    found: list[dict[str, Any]] = []
    seen: set[int] = set()
    waiting: deque[Any] = deque([root])
    while waiting:
        schema = waiting.popleft()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        found.append(schema)
        seen.add(id(schema))
        if isinstance(schema.get("$ref"), str):
            waiting.append(target_of(root, schema["$ref"]))
        waiting.extend(subschemas_of(schema))
    return found


def subschemas_of(schema: Schema) -> Iterator[Schema]:
    """The schemas directly within a schema, definitions included, references left alone."""
    for key in _MAPS:
        parts = schema.get(key)
        yield from (part for part in (parts.values() if isinstance(parts, dict) else ()) if isinstance(part, dict))
    for key in (*_LISTS, "items"):
        parts = schema.get(key)
        yield from (part for part in (parts if isinstance(parts, list) else ()) if isinstance(part, dict))
    yield from (schema[key] for key in _SCHEMAS if isinstance(schema.get(key), dict))


def _check_keywords(schema: dict[str, Any]) -> None:
    if "x-guidance" in schema:
        raise GrammarError("the keyword x-guidance is not supported")
    for identifier in ("$id", "id"):
        if identifier in schema and not isinstance(schema[identifier], str):
            raise GrammarError(f"{identifier} must be a string")
    if isinstance(schema.get("pattern"), str):
        check_pattern(schema["pattern"])
    if isinstance(schema.get("patternProperties"), dict):
        for pattern in schema["patternProperties"]:
            check_pattern(pattern)


def _has_end(root: dict[str, Any], schemas: list[dict[str, Any]]) -> bool:
    """Whether some finite value may match: the least fixed point of "all required parts are finite"."""
    ended: set[int] = set()
    inner_first = schemas[::-1]
    grows = True
    while grows and id(root) not in ended:
        grows = False
        for schema in inner_first:
            if id(schema) not in ended and _ends(schema, root, ended):
                ended.add(id(schema))
                grows = True
    return id(root) in ended


def _ends(schema: dict[str, Any], root: dict[str, Any], ended: set[int]) -> bool:
    def ends(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in ended

    if isinstance(schema.get("$ref"), str) and not ends(target_of(root, schema["$ref"])):
        return False
    if not all(ends(part) for part in _list(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        if _list(schema, key) and not any(ends(part) for part in _list(schema, key)):
            return False
    kind = schema.get("type")
    if "enum" in schema or "const" in schema:
        return True
    if kind in ("object", ["object"]):
        properties = schema.get("properties")
        required = _list(schema, "required")
        return not isinstance(properties, dict) or all(
            ends(properties.get(name)) for name in required if isinstance(name, str)
        )
    if kind in ("array", ["array"]):
        num_items = schema.get("minItems")
        if not isinstance(num_items, int) or num_items < 1:
            return True
        first = _list(schema, "prefixItems") or _list(schema, "items")
        return all(ends(part) for part in first[:num_items]) and (num_items <= len(first) or ends(schema.get("items")))
    return True


def target_of(root: dict[str, Any], reference: str) -> Any:
    """The target of a JSON pointer; None for other kinds of references, which the grammar library judges."""
    part: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(name)
        elif isinstance(part, list) and name.isdigit() and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
    return part if reference.startswith(("#/", "#")) and ("/" in reference or reference == "#") else None


def _count(bounds: str) -> int | None:
    """The larger of a repetition's bounds; None if these are none."""
    digits = [bound.strip() for bound in bounds.split(",")]
    return max((int(each.lstrip("0")[:12] or "0") for each in digits if each.isdecimal()), default=None)


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _written_out(pattern: str) -> int:
    """Characters of the pattern with `{n}` and `{n,m}` written out; escapes and sets count as one."""
    sizes, last = [0], 0  # sizes of the open groups, outermost first; size of the last character or group
    i = 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            last, i = 1, i + 2
        elif char == "[":
            end = pattern.find("]", i + 2)
            last, i = 1, len(pattern) if end < 0 else end + 1
        elif char == "(":
            sizes.append(0)
            last, i = 0, i + 1
            continue
        elif char == ")" and len(sizes) > 1:
            last, i = sizes.pop(), i + 1
        elif char == "{":
            end = pattern.find("}", i)
            count = _count(pattern[i + 1 : end]) if end > 0 else None
            if count is not None:
                sizes[-1] += last * (count - 1)
                last *= count
                i = end + 1
                continue
            last, i = 1, i + 1
        else:
            last, i = 1, i + 1
        sizes[-1] += last
    return sum(sizes)
