"""JSON texts are measured as they come: nothing is counted that is only written in a text, and no cut is noticed."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.json_size import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_ESCAPES,
    MAX_EXPONENTS,
    MAX_PLAIN_VALUES,
    MAX_VALUES,
    JsonSize,
    TooManyValuesError,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='"\\[]{},:aé\n', max_size=8),
    lambda children: st.lists(children) | st.dictionaries(st.text(alphabet='"\\[{,', max_size=3), children),
    max_leaves=30,
)


def _counted(value: Any) -> int:
    """Lists, objects and texts, names included."""
    if isinstance(value, list):
        return 1 + sum(map(_counted, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_counted, value.values()))
    return int(isinstance(value, str))


@given(VALUES, st.booleans(), st.lists(st.integers(0, 400), max_size=6))
def test_what_is_counted_is_what_would_be_made(value: Any, is_ascii: bool, cuts: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    size = JsonSize()
    for begin, end in pairwise([0, *sorted(cuts), len(text)]):
        size.feed(text[begin:end])
    assert size.num_values == _counted(value)
    size.begin()
    size.feed(text)
    assert size.num_values == 2 * _counted(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" + b"[]," * MAX_VALUES, f"at most {MAX_VALUES} lists"),
        (b'["",' + b'"",' * MAX_VALUES, f"at most {MAX_VALUES} lists"),
        (b"[1," * MAX_DEPTH + b"[", f"{MAX_DEPTH} levels"),
        (b'[0.5, "' + b"7" * 1000 + b'", ' + b"7" * (MAX_DIGITS + 1), f"{MAX_DIGITS} digits"),
        (b"[" + b"1e5,2E5,true," * MAX_EXPONENTS, f"{MAX_EXPONENTS} numbers with an exponent"),
        (b'["' + rb"\n" * MAX_ESCAPES + rb"\"", f"{MAX_ESCAPES} backslashes"),
        (b"[" + b"1," * (MAX_VALUES + MAX_PLAIN_VALUES + 1), f"at most {MAX_PLAIN_VALUES} numbers"),
    ],
)
def test_what_is_too_large_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(TooManyValuesError, match=message):
        JsonSize().feed(text)
    with pytest.raises(TooManyValuesError, match=message):
        _feed_in_pieces(text)


def _feed_in_pieces(text: bytes) -> None:
    size = JsonSize()
    for begin in range(0, len(text), 100):
        size.feed(text[begin : begin + 100])


def test_what_is_large_in_bytes_alone_is_taken() -> None:
    size = JsonSize()
    size.feed(json.dumps({"content": '[{"a": [1, 2]}]' * 100_000, "ids": list(range(MAX_PLAIN_VALUES))}).encode())
    assert size.num_values == 5
    size.feed(b'{"a": %s, "b": %s.%s}' % (b"7" * MAX_DIGITS, b"7" * 100, b"5" * 100))
    JsonSize().feed(b"]" * 1000 + b"[" * MAX_DEPTH)  # no JSON, and not this module's business
