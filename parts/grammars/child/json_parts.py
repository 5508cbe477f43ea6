"""Which schemas of a JSON schema apply to the same value, and what follows for objects.

An object that lists its properties gets no others, unless the schema speaks of others: models make up keys wherever
they may. Where several schemas apply to one object (`allOf`, `anyOf` beside `properties`, a `$ref` with neighbours),
each of them lists only a part, so that it is the whole that is closed.
"""

import re
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from penstock.parts.grammars.child.json_schema import Note, Schema, schemas_of, target_of, types_of

_LISTS = ("allOf", "anyOf", "oneOf")
_SINGLE = ("if", "then", "else", "not")
_MAPS = ("dependentSchemas", "dependencies")
SAYS_NOTHING = frozenset(
    {
        *("$defs", "definitions", "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default"),
        *("examples", "example", "readOnly", "writeOnly", "deprecated", "discriminator", "type", "nullable"),
    }
)
"""Keywords beside which a `$ref`, an `anyOf` or a `oneOf` is all that there is."""
_OF_OTHERS = frozenset(
    {"additionalProperties", "unevaluatedProperties", "propertyNames", "enum", "const", "$dynamicRef", "$recursiveRef"}
)
"""Keywords with which a schema speaks of properties that it does not list."""


Reads = Callable[[Schema], bool]


def combined(root: Schema) -> set[int]:
    """The ids of all schemas that apply to a value together with others."""
    schemas = schemas_of(root)
    found: set[int] = set()
    waiting = [part for schema in schemas if not _is_alone(schema) for part in _parts(root, schema)]
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found.add(id(part))
            waiting.extend(_parts(root, part))
    return found


def has_combined(root: Schema, kinds: set[str]) -> bool:
    """Whether values of these types match several schemas at once."""
    schemas = schemas_of(root)
    return any(not _is_alone(schema) and types_of(schema) & kinds and any(_parts(root, schema)) for schema in schemas)


def close_objects(root: Schema, note: Note) -> None:
    """Allow no properties but those listed, wherever the schema says nothing of others; in place."""
    of_others = combined(root)
    closed = set()
    for schema in schemas_of(root):
        if id(schema) in of_others or "object" not in types_of(schema):
            continue
        members = list(_members(root, schema))
        if None in members or _is_alone(schema):
            continue
        named = _names(member for member in members if member is not None)
        least = schema.get("minProperties", 0)
        if named is None or (isinstance(least, int | float) and least > len(named)):
            continue
        if any("patternProperties" in member for member in members[1:] if member is not None):
            continue
        listed = schema.setdefault("properties", {})
        for name in named:
            listed.setdefault(name, {})
        schema["additionalProperties"] = False
        closed.add(id(schema))
    for schema in schemas_of(root):
        cases = [resolved(root, case) for case in _list(schema, "oneOf")]
        if any(id(case) in closed for case in cases) and not all(
            _exclude(root, *two) for two in combinations(cases, 2)
        ):
            note("oneOf")  # without the closing, a text may match two of them


def settle_patterns(root: Schema, reads: Reads) -> None:
    """Leave out patterns of properties that no name can match besides those listed, in place.

    The library would offer such a name, and then find none. `reads` says whether it can read a schema, and write texts.
    """
    for schema in schemas_of(root):
        patterns, listed = schema.get("patternProperties"), _dict(schema, "properties")
        if not isinstance(patterns, dict) or "object" not in types_of(schema):
            continue
        taken: Schema = {"type": "object", "properties": dict.fromkeys(listed, False), "minProperties": 1}
        for pattern in [*patterns]:
            if not reads({**taken, "patternProperties": {pattern: {}}, "additionalProperties": False}):
                more = patterns.pop(pattern)
                for name in listed:
                    if _matches(pattern, name):
                        listed[name] = {"allOf": [listed[name], more]}
        more = schema.get("additionalProperties")
        if patterns and more is not False and not reads({**taken, "patternProperties": dict.fromkeys(patterns, False)}):
            schema["additionalProperties"] = False
        if not patterns:
            del schema["patternProperties"]


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _is_alone(schema: Schema) -> bool:
    """Whether a schema only names another one, or alternatives: what these list is then all there is."""
    said = schema.keys() - SAYS_NOTHING
    return said in ({"$ref"}, {"anyOf"}, {"oneOf"}) or (said == {"allOf"} and len(_list(schema, "allOf")) == 1)


def _parts(root: Schema, schema: Schema) -> Iterator[Schema]:
    """The schemas that a schema applies to its own value."""
    for part in _parts_or_none(root, schema):
        if part is not None:
            yield part


def _parts_or_none(root: Schema, schema: Schema) -> Iterator[Schema | None]:
    """None stands for a reference that leads nowhere."""
    if "$ref" in schema:
        target = target_of(root, schema["$ref"]) if isinstance(schema["$ref"], str) else None
        yield target if isinstance(target, dict) else None
    for key in _LISTS:
        yield from (part for part in _list(schema, key) if isinstance(part, dict))
    for key in _SINGLE:
        if isinstance(schema.get(key), dict):
            yield schema[key]
    for key in _MAPS:
        parts = schema.get(key)
        yield from (part for part in (parts.values() if isinstance(parts, dict) else ()) if isinstance(part, dict))


def _members(root: Schema, schema: Schema) -> Iterator[Schema | None]:
    """A schema and all others that apply to its value, itself first."""
    seen: set[int] = set()
    waiting: list[Schema | None] = [schema]
    while waiting:
        member = waiting.pop(0)
        if member is None:
            yield None
        elif id(member) not in seen:
            seen.add(id(member))
            yield member
            waiting.extend(_parts_or_none(root, member))


def _names(members: Iterator[Schema]) -> dict[str, None] | None:
    """The properties that these schemas speak of; None if they list none, or speak of others."""
    named: dict[str, None] = {}
    lists = False
    for member in members:
        if _OF_OTHERS & member.keys():
            return None
        listed = member.get("properties")
        if isinstance(listed, dict) and listed:
            lists = True
            named |= dict.fromkeys(listed)
        named |= dict.fromkeys(name for name in _list(member, "required") if isinstance(name, str))
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            needs = member.get(key)
            for name, needed in needs.items() if isinstance(needs, dict) else ():
                named[name] = None
                named |= dict.fromkeys(each for each in needed if isinstance(each, str) and isinstance(needed, list))
    return named if lists else None


def _exclude(root: Schema, one: Any, other: Any) -> bool:
    """Whether it is certain that no value matches both."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is False or other is False
    if not _kinds(one) & _kinds(other):
        return True
    shared = {*_list(one, "required")} & {*_list(other, "required")}
    if types_of(one) != {"object"} or types_of(other) != {"object"}:
        return False
    for name in shared:
        values = [_values(resolved(root, _dict(schema, "properties").get(name))) for schema in (one, other)]
        if values[0] is not None and values[1] is not None and not values[0] & values[1]:
            return True
    return False


def _kinds(schema: Schema) -> frozenset[str]:
    kinds = types_of(schema)
    return kinds | {"integer"} if "number" in kinds else kinds


def _values(schema: Any) -> set[str] | None:
    """The texts that a schema lists; None if it allows anything else."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    return set(values)


def resolved(root: Schema, schema: Any) -> Any:
    """The schema that a schema refers to, if it does nothing else."""
    for _ in range(8):
        if not isinstance(schema, dict) or schema.keys() - SAYS_NOTHING != {"$ref"}:
            break
        schema = target_of(root, schema["$ref"]) if isinstance(schema["$ref"], str) else None
    return schema


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _dict(schema: Schema, key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}
