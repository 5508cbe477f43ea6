"""The numbers of a JSON schema, exact and of bounded length, in bounds that the grammar library can read.

The library computes with floats of 64 bits and does not bound digits by itself. Here bounds and divisors are computed
as fractions: bounds become multiples of the divisor, whatever a float cannot hold is rounded towards the allowed range,
and every number gets a largest size and a smallest step. A text that fits is therefore a text that is allowed.

    integer            at most 19 digits, as in 64 bits
    number             16 digits before the point and 9 after it at most, or what the bounds ask for; no exponent
    few multiples      listed one by one
"""

import math
from fractions import Fraction
from typing import NamedTuple

from penstock.frontend.json_types import type_of
from penstock.parts.grammars.child.json_schema import Note, Schema, types_of

MAX_INTEGER = 9_223_372_036_854_774_784
"""The largest float below 2**63: of 19 digits."""

MAX_NUMBER = 10**16
"""Numbers with a fraction stay below this, unless their lower bound is above it."""

FRACTION_DIGITS = 9

MAX_MULTIPLE = 10_000
"""A divisor's automaton has about this many states: 30 ms to build, 5 MB."""

_MAX_COMBINED_MULTIPLE = 1000
"""For divisors in schemas that others are combined with: the library multiplies them in 32 bits."""

_MAX_BOUNDED_MULTIPLE = 1000
"""Multiples of more get no largest size: together, the automata of the bounds and of the divisor are too large."""

_MAX_FRACTION_DIGITS = 10
"""Of a divisor: the library cannot read more."""

_MAX_LISTED = 32
"""So many multiples are listed, because the library's own arithmetic may find none between close bounds."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMERIC = (*_BOUNDS, "multipleOf")


class _Range(NamedTuple):
    """What a schema's bounds allow."""

    low: Fraction | None
    high: Fraction | None
    is_low_open: bool = False  # the bound itself is not allowed
    is_high_open: bool = False


def exact(value: object) -> Fraction | None:
    """A JSON number as it was written; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return Fraction(value)
    return Fraction(str(value)) if math.isfinite(value) else None


def bound_numbers(schema: Schema, note: Note, *, is_combined: bool) -> None:
    """Rewrite a schema's numeric keywords, in place.

    Args:
        note: is told of what cannot be enforced.
        is_combined: whether other schemas apply to the same values.
    """
    kinds = types_of(schema) & {"integer", "number"}
    said = [keyword for keyword in _NUMERIC if keyword in schema]
    if not kinds or not (said or "type" in schema) or "enum" in schema or "const" in schema:
        return
    allowed = _range(schema)
    step = exact(schema["multipleOf"]) if "multipleOf" in schema else None
    if allowed is None or ("multipleOf" in schema and (step is None or step <= 0)):
        return  # not a valid schema, or not a number: the library says so
    if _is_empty(allowed):
        schema.pop("multipleOf", None)
        return
    if step is not None and is_combined and max(step.numerator, step.denominator) > _MAX_COMBINED_MULTIPLE:
        note("multipleOf")
        step = None
    if kinds == {"integer"}:
        _bound_integers(schema, allowed, step, note)
    elif step is not None:
        _bound_multiples(schema, allowed, step, note)
    else:
        _bound_fractions(schema, allowed, note, is_combined=is_combined)


def fits(value: object, schema: Schema) -> bool:
    """Whether a value has the type and is within the bounds and lengths that a schema names; other keywords count not.

    Numbers are compared as they were written.
    """
    if type_of(value) not in types_of(schema) and not (type_of(value) == "integer" and "number" in types_of(schema)):
        return False
    if isinstance(value, str):
        least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
        return not isinstance(least, int | float) or not isinstance(most, int | float) or least <= len(value) <= most
    number, allowed = exact(value), _range(schema)
    if number is None or allowed is None:
        return True
    if allowed.low is not None and (number < allowed.low or (allowed.is_low_open and number == allowed.low)):
        return False
    if allowed.high is not None and (number > allowed.high or (allowed.is_high_open and number == allowed.high)):
        return False
    step = exact(schema.get("multipleOf"))
    return not step or not number % step


def states_of(divisor: Fraction) -> float:
    """About how many states are needed to track a number's remainder: for powers of ten, the last digits suffice."""
    size = int(divisor * 10 ** (_decimals(divisor) or 0))
    return len(str(size)) if str(size).strip("0") == "1" and size < 2**32 else size


def _range(schema: Schema) -> _Range | None:
    """The bounds that a schema names, as in any draft; None if one of them is no number."""
    low, high = schema.get("minimum"), schema.get("maximum")
    over, under = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    is_low_open, is_high_open = over is True, under is True  # as in draft 4
    numbers = {name: exact(value) for name, value in zip("lhou", (low, high, over, under), strict=True)}
    for name, value in zip("lhou", (low, high, over, under), strict=True):
        if value is not None and numbers[name] is None and not isinstance(value, bool):
            return None
    lowest, highest = numbers["l"], numbers["h"]
    if (number := numbers["o"]) is not None and (lowest is None or number >= lowest):
        lowest, is_low_open = number, True
    if (number := numbers["u"]) is not None and (highest is None or number <= highest):
        highest, is_high_open = number, True
    return _Range(lowest, highest, is_low_open, is_high_open)


def _is_empty(allowed: _Range) -> bool:
    low, high, is_low_open, is_high_open = allowed
    if low is None or high is None:
        return False
    return low > high or (low == high and (is_low_open or is_high_open))


def _bound_integers(schema: Schema, allowed: _Range, step: Fraction | None, note: Note) -> None:
    every = 1 if step is None else step.numerator  # a whole number is a multiple of p/q if it is one of p
    if states_of(Fraction(every)) > MAX_MULTIPLE:
        note("multipleOf")
        every = 1
    low = -MAX_INTEGER if allowed.low is None else math.ceil(allowed.low)
    high = MAX_INTEGER if allowed.high is None else math.floor(allowed.high)
    low += allowed.is_low_open and low == allowed.low
    high -= allowed.is_high_open and high == allowed.high
    if low > MAX_INTEGER or high < -MAX_INTEGER:
        _drop_bounds(schema, note)
        return
    low, high = max(low, -MAX_INTEGER), min(high, MAX_INTEGER)
    low, high = -(-low // every) * every, high // every * every
    if low > high:
        _write_nothing(schema)
        return
    least, most = _float_inwards(Fraction(low), up=True), _float_inwards(Fraction(high), up=False)
    if least > most:  # beyond 53 bits, between two neighbouring floats
        note("minimum or maximum")
        least, most = _float_inwards(Fraction(low), up=False), _float_inwards(Fraction(high), up=True)
    words: dict[str, float] = {} if every == 1 else {"multipleOf": every}
    if every <= _MAX_BOUNDED_MULTIPLE or allowed.low is not None:
        words["minimum"] = int(least)
    if every <= _MAX_BOUNDED_MULTIPLE or allowed.high is not None:
        words["maximum"] = int(most)
    _write(schema, **words)


def _bound_multiples(schema: Schema, allowed: _Range, step: Fraction, note: Note) -> None:
    places = _decimals(step)
    readable = None if places is None else _as_library_reads(int(step * 10**places), places)
    if readable is None or states_of(step) > MAX_MULTIPLE:
        note("multipleOf")
        if places is None or places > _MAX_FRACTION_DIGITS:
            _bound_fractions(schema, allowed, note, is_combined=False)
            return
        coarse = Fraction(1, 10**places)  # every multiple has at most as many digits
        step, readable = coarse, float(coarse)
    first = -MAX_NUMBER // step + 1 if allowed.low is None else math.ceil(allowed.low / step)
    last = MAX_NUMBER // step - 1 if allowed.high is None else math.floor(allowed.high / step)
    first += allowed.is_low_open and first * step == allowed.low
    last -= allowed.is_high_open and last * step == allowed.high
    if first > last and None not in (allowed.low, allowed.high):
        _write_nothing(schema)
        return
    if max(abs(first), abs(last)) * step > MAX_INTEGER or first > last:
        _drop_bounds(schema, note)
        return
    if last - first < _MAX_LISTED:
        _write_list(schema, [step * k for k in range(first, last + 1)])
        return
    words = {"multipleOf": readable}
    if states_of(step) <= _MAX_BOUNDED_MULTIPLE or allowed.low is not None:
        words["minimum"] = _decimal_inwards(first * step, up=True)
    if states_of(step) <= _MAX_BOUNDED_MULTIPLE or allowed.high is not None:
        words["maximum"] = _decimal_inwards(last * step, up=False)
    _write(schema, **words)


def _bound_fractions(schema: Schema, allowed: _Range, note: Note, *, is_combined: bool) -> None:
    low, high, is_low_open, is_high_open = allowed
    if (low is not None and low > MAX_INTEGER) or (high is not None and high < -MAX_INTEGER):
        _drop_bounds(schema, note)
        return
    if low is None or low <= -MAX_NUMBER:
        low, is_low_open = Fraction(-MAX_NUMBER), True
        if high is not None and high <= low:
            low, is_low_open = max(10 * high, Fraction(-MAX_INTEGER)), False
    if high is None or high >= MAX_NUMBER:
        high, is_high_open = Fraction(MAX_NUMBER), True
        if low >= high:
            high, is_high_open = min(10 * low, Fraction(MAX_INTEGER)), False
    grid = Fraction(1, 10**FRACTION_DIGITS)
    if low == high:
        _write(schema, minimum=_number(low), maximum=_number(high))
        return
    on_grid = (math.ceil(low / grid) * grid, math.floor(high / grid) * grid)
    is_wide = on_grid[1] - on_grid[0] >= 10 * grid and high - low > max(abs(low), abs(high)) / 10**12
    words: dict[str, float] = {}
    if is_wide and not is_combined:
        words["multipleOf"] = float(grid)
        is_low_open, is_high_open = is_low_open and on_grid[0] == low, is_high_open and on_grid[1] == high
        low, high = on_grid
    words["exclusiveMinimum" if is_low_open else "minimum"] = _decimal_inwards(low, up=True)
    words["exclusiveMaximum" if is_high_open else "maximum"] = _decimal_inwards(high, up=False)
    _write(schema, **words)


def _write(schema: Schema, **words: float) -> None:
    for keyword in _NUMERIC:
        schema.pop(keyword, None)
    schema.update(words)


def _write_nothing(schema: Schema) -> None:
    """No number fits, which the library finds out by itself from such bounds."""
    _write(schema, minimum=1, maximum=0)


def _write_list(schema: Schema, values: list[Fraction]) -> None:
    """Only these numbers, beside values of the schema's other types."""
    if len(values) == 1:
        _write(schema, minimum=_number(values[0]), maximum=_number(values[0]))
        return
    _write(schema)
    allow_only(schema, [_number(value) for value in values], {"integer", "number"})


def allow_only(schema: Schema, values: list[object], kinds: set[str]) -> None:
    """Of values of these types, a schema allows only those listed; values of its other types as before."""
    others = sorted(types_of(schema) - kinds)
    listed: Schema = {"enum": values}
    part = {"anyOf": [{"type": others}, listed]} if others else listed
    if not others and not any(keyword in schema for keyword in ("enum", "const", "allOf", "anyOf", "oneOf", "$ref")):
        schema.pop("type", None)
        schema.update(listed)
        return
    parts = schema.get("allOf")
    schema["allOf"] = [*(parts if isinstance(parts, list) else ()), part]


def _drop_bounds(schema: Schema, note: Note) -> None:
    """The bounds are beyond what the library can read."""
    for keyword in _NUMERIC:
        if schema.pop(keyword, None) is not None:
            note(keyword)


def _decimals(number: Fraction) -> int | None:
    """Digits of a number behind the point; None if there is no end to them."""
    rest, times = number.denominator, {2: 0, 5: 0}
    for prime in times:
        while rest % prime == 0:
            rest, times[prime] = rest // prime, times[prime] + 1
    return max(times.values()) if rest == 1 else None


def _number(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)


def _float_inwards(value: Fraction, *, up: bool) -> float:
    """The nearest float that is not below (`up`) or not above the value."""
    near = float(value)
    if up and Fraction(near) < value:
        return math.nextafter(near, math.inf)
    if not up and Fraction(near) > value:
        return math.nextafter(near, -math.inf)
    return near


def _decimal_inwards(value: Fraction, *, up: bool) -> float:
    """The nearest number that a float writes with exactly its digits and that is not below, or not above, the value."""
    for places in (None, *range(FRACTION_DIGITS, -1, -1)):
        rounded = value
        if places is not None:
            rounded = Fraction((math.ceil if up else math.floor)(value * 10**places), 10**places)
        if exact(float(rounded)) == rounded:
            return _number(rounded)
    return _float_inwards(value, up=up)


def _as_library_reads(size: int, places: int) -> float | None:
    """A float that the library takes for size / 10**places; None if it has none."""
    if size >= 2**32 or places > _MAX_FRACTION_DIGITS:
        return None
    near = size / 10**places
    up = down = near
    for _ in range(32):
        for candidate in (up, down):
            if _read_by_library(candidate) == (size, places):
                return int(candidate) if candidate.is_integer() else candidate
        up, down = math.nextafter(up, math.inf), math.nextafter(down, 0.0)
    return None


def _read_by_library(value: float) -> tuple[int, int] | None:
    """A float as the library reads a divisor: multiplied by ten until it is whole."""
    places = 0
    while not value.is_integer():
        value, places = value * 10.0, places + 1
    if value >= 2**32:
        return None
    size = int(value)
    while places and size % 10 == 0:
        size, places = size // 10, places - 1
    return size, places
