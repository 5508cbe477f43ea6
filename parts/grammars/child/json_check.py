"""Checks a finished text against a JSON schema: for what a grammar cannot enforce during generation.

Runs in the process that parses grammars (`read.py`), because a client's schema and patterns may make it slow.
"""

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec

from penstock.parts.grammars.child.json_schema import GrammarError, Schema

_MAX_MESSAGE = 300
_MAX_EXPONENT = 400
"""Numbers with a larger one are read as floats."""


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
        value = _AS_WRITTEN.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return "it is not complete JSON"
    schema = _AS_WRITTEN.decode(schema_text)
    if isinstance(schema, bool):
        return "" if schema else "nothing matches the schema"
    # The registry is empty and fetches nothing: only references within the schema work.
    validator = _exact(_validator_type(schema))(schema, registry=Registry())
    try:
        error = best_match(validator.iter_errors(value))
    except (Unresolvable, re.error, RecursionError) as unreadable:
        return f"it could not be checked: {type(unreadable).__name__}"
    return "" if error is None else f"{error.json_path}: {error.message[:_MAX_MESSAGE]}"


class _Decimal(Decimal):
    """A number with a fraction, as it was written: floats know no multiples of 0.1."""

    __repr__ = Decimal.__str__


def _number(text: str) -> Any:
    exponent = text.lower().partition("e")[2]
    if exponent and abs(int(exponent[:20])) > _MAX_EXPONENT:
        return float(text)
    number = _Decimal(text)
    return int(number) if number == number.to_integral_value() else number


_AS_WRITTEN = msgspec.json.Decoder(float_hook=_number)


def _is_multiple(_validator: Any, divisor: Any, value: Any, _schema: Schema) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    for number in (value, divisor):
        if isinstance(number, bool) or not isinstance(number, int | float | Decimal):
            return
        if not isinstance(number, int) and not math.isfinite(number):
            return
    if divisor and Fraction(value) % Fraction(divisor):
        yield ValidationError(f"{value!r} is not a multiple of {divisor!r}")


def _exact(validator: Any) -> Any:
    """The validator, with exact multiples."""
    from jsonschema.validators import extend

    return extend(validator, {"multipleOf": _is_multiple})


def _validator_type(schema: Schema) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for

    return validator_for(schema, default=Draft202012Validator)
