"""Checks a finished text against a JSON schema: for what a grammar cannot enforce during generation.

Runs in the process that parses grammars (`child.py`), because a client's schema and patterns may make it slow.
"""

import re
from typing import Any

import msgspec

from penstock.frontend.grammars.json_schema import GrammarError, Schema

_MAX_MESSAGE = 300


def check_is_schema(schema: Schema) -> None:
    """Check a schema against the draft that it names, or 2020-12.

    Raises:
        GrammarError: naming the place and the error.
    """
    from jsonschema.exceptions import SchemaError, best_match

    validator = _validator_type(schema)
    try:
        error = best_match(validator(validator.META_SCHEMA).iter_errors(schema))
    except SchemaError as unreadable:
        raise GrammarError(str(unreadable.message)[:_MAX_MESSAGE]) from None
    if error is not None:
        raise GrammarError(f"it is not a valid schema: {error.json_path}: {error.message[:_MAX_MESSAGE]}")


def mismatch(schema_text: str, text: str) -> str:
    """What is wrong with a text, in one sentence; empty if it matches the schema."""
    from jsonschema.exceptions import best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return "it is not complete JSON"
    schema = msgspec.json.decode(schema_text)
    if isinstance(schema, bool):
        return "" if schema else "nothing matches the schema"
    # The registry is empty and fetches nothing: only references within the schema work.
    validator = _validator_type(schema)(schema, registry=Registry())
    try:
        error = best_match(validator.iter_errors(value))
    except (Unresolvable, re.error, RecursionError) as unreadable:
        return f"it could not be checked: {type(unreadable).__name__}"
    return "" if error is None else f"{error.json_path}: {error.message[:_MAX_MESSAGE]}"


def _validator_type(schema: Schema) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for

    return validator_for(schema, default=Draft202012Validator)
