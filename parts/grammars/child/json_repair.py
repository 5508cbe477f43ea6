"""Finds the schemas in a schema that the grammar library cannot read, and removes what it stumbles over, there alone.

the whole is not read ──▶ down to a part that is not read although all its own parts are
                          ├▶ one keyword of it is left out, then more of them, until it is read
                          └▶ again from the top, until the whole is read
"""

from collections.abc import Callable, Iterator
from time import process_time
from typing import Any

from penstock.parts.grammars.child.json_schema import Note, Schema, subschemas_of, target_of

MAX_SECONDS = 1.0
"""CPU time for finding what is at fault; after that the schema's type is all that is left of it."""

_KEYWORDS: tuple[tuple[str, ...], ...] = (
    ("multipleOf",),
    ("format",),
    ("pattern",),
    ("patternProperties", "additionalProperties"),
    ("minProperties", "maxProperties"),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("allOf",),
    ("oneOf",),
    ("anyOf",),
    ("enum", "const"),
    ("$ref",),
    ("prefixItems", "items", "additionalItems"),
    ("properties", "required", "additionalProperties"),
)
"""What is left out first comes first."""

_KEPT = ("$defs", "definitions", "$schema", "$id")
_LIFTED = "penstock-part-"

Reads = Callable[[Schema], bool]


def repair(root: Schema, reads: Reads, note: Note) -> None:
    """Leave out keywords until `reads` says that the library can read the schema, in place; `note` is told of each."""
    _lift_references(root)
    until = process_time() + MAX_SECONDS
    while not reads(root):
        found = _at_fault(root, root, reads, set(), until)
        if process_time() > until or not _relax(root, found, reads, note):
            break
    else:
        return
    kept = {"type": root["type"]} if isinstance(root.get("type"), str) else {}
    root.clear()
    root.update(kept)
    note("all of it but its type")


def _at_fault(root: Schema, schema: Schema, reads: Reads, seen: set[int], until: float) -> Schema:
    """The innermost schema within `schema`, itself included, that is not read."""
    seen.add(id(schema))
    for part in _parts(root, schema):
        if process_time() > until:
            break
        if id(part) not in seen and not reads(_alone(root, part)):
            return _at_fault(root, part, reads, seen, until)
    return schema


def _parts(root: Schema, schema: Schema) -> Iterator[Schema]:
    yield from subschemas_of(schema)
    target = target_of(root, schema["$ref"]) if isinstance(schema.get("$ref"), str) else None
    if isinstance(target, dict):
        yield target


def _alone(root: Schema, schema: Schema) -> Schema:
    """A schema as a document of its own, with the definitions that it may refer to."""
    return schema if schema is root else {**{key: root[key] for key in _KEPT if key in root}, **schema}


def _relax(root: Schema, schema: Schema, reads: Reads, note: Note) -> bool:
    """Leave out as little of one schema as helps. False if there is nothing left to leave out."""
    groups = [[keyword for keyword in group if keyword in schema] for group in _KEYWORDS]
    groups = [group for group in groups if group]
    for group in groups:
        if reads(_alone(root, {key: value for key, value in schema.items() if key not in group})):
            _drop(schema, group, note)
            return True
    for group in groups:
        _drop(schema, group, note)
        if reads(_alone(root, schema)):
            break
    return bool(groups)


def _drop(schema: Schema, keywords: list[str], note: Note) -> None:
    for keyword in keywords:
        if keyword in schema:
            del schema[keyword]
            note(keyword)


def _lift_references(root: Schema) -> None:
    """Make all references point to definitions, so that each schema can be read without those around it."""
    if "$id" in root or "id" in root:
        return
    pointers: dict[str, list[Schema]] = {}
    waiting: list[Schema] = [root]
    seen: set[int] = set()
    while waiting:
        schema = waiting.pop()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        pointer = schema.get("$ref")
        if isinstance(pointer, str) and not pointer.startswith(("#/$defs/", "#/definitions/")):
            pointers.setdefault(pointer, []).append(schema)
        waiting.extend(_parts(root, schema))
    targets: list[tuple[str, Any, list[Schema]]] = [
        (f"{_LIFTED}{i}", target_of(root, pointer), users) for i, (pointer, users) in enumerate(pointers.items())
    ]
    definitions = root.get("$defs")
    if not targets or not (definitions is None or isinstance(definitions, dict)):
        return
    for name, target, users in targets:
        if not isinstance(target, dict):
            continue
        definitions = root.setdefault("$defs", {})
        if target is root:
            target = {key: value for key, value in root.items() if key not in _KEPT}
            for key in target:
                del root[key]
            root["$ref"] = f"#/$defs/{name}"
            users = [target if user is root else user for user in users]
        definitions[name] = target
        for user in users:
            user["$ref"] = f"#/$defs/{name}"
