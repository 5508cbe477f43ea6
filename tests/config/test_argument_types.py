"""Numbers of commands: within bounds, or refused in a sentence that says which number is meant."""

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest

from penstock.config import argument_types as types


@pytest.mark.parametrize(
    ("parse", "good", "value", "bad"),
    [
        (types.positive, "1", 1, ("0", "-1", "x", "1.5", "")),
        (types.not_negative, "0", 0, ("-1", "x")),
        (types.positive_float, "0.5", 0.5, ("0", "-1", "nan", "inf", "x", "")),
        (types.not_negative_float, "0", 0.0, ("-0.1", "nan", "inf")),
        (types.share, "1", 1.0, ("0", "1.1", "nan")),
        (types.length_range, "2:3", (2, 3), ("3:2", "0:3", "x", ":")),
    ],
)
def test_numbers(parse: Callable[[str], object], good: str, value: object, bad: tuple[str, ...]) -> None:
    assert parse(good) == value
    for text in bad:
        with pytest.raises(ArgumentTypeError, match=r"^must "):
            parse(text)
