"""Types of arguments for commands with a parser of their own (`type=` of argparse): numbers within bounds."""

import math
from argparse import ArgumentTypeError


def positive(text: str) -> int:
    """A whole number from 1."""
    return _whole(text, 1)


def not_negative(text: str) -> int:
    """A whole number from 0."""
    return _whole(text, 0)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if value <= 0:
        raise ArgumentTypeError(f"must be above 0, got {text!r}")
    return value


def not_negative_float(text: str) -> float:
    """A finite number from 0."""
    value = _number(text)
    if value < 0:
        raise ArgumentTypeError(f"must be at least 0, got {text!r}")
    return value


def share(text: str) -> float:
    """A part of a whole: above 0, and 1 at most."""
    value = positive_float(text)
    if value > 1:
        raise ArgumentTypeError(f"must be 1 at most, got {text!r}")
    return value


def length_range(text: str) -> tuple[int, int]:
    """`128` or `100:1024` as (low, high), both included."""
    low, _, high = text.partition(":")
    found = positive(low), positive(high or low)
    if found[0] > found[1]:
        raise ArgumentTypeError(f"must go from a length to one that is not shorter, got {text!r}")
    return found


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentTypeError(f"must be a number, got {text!r}")
    return value
