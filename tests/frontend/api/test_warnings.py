"""What clients are told beside an answer."""

from unittest.mock import Mock

import pytest

from penstock.frontend.exchange import exchange
from penstock.frontend.exchange.exchange import MAX_WARNING_BYTES, WARNING_HEADER, warning_headers


def test_no_warning_is_no_header() -> None:
    assert warning_headers([]) == {}


def test_each_is_told_once_and_in_order() -> None:
    assert warning_headers(["b: two", "a: one", "b: two"]) == {WARNING_HEADER: "b: two; a: one"}


@pytest.mark.parametrize("text", ["a\r\nSet-Cookie: x", "é\0\x7f", "\ud800", "𝄞" * 10])
def test_no_text_breaks_the_header(text: str) -> None:
    value = warning_headers([text])[WARNING_HEADER]
    assert value.isascii()
    assert value.isprintable()


def test_there_are_bounds() -> None:
    value = warning_headers(f"field {i}: " + "x" * 90 for i in range(1000))[WARNING_HEADER]
    assert len(value) <= MAX_WARNING_BYTES
    assert value.endswith(" more")
    assert len(warning_headers(["x" * 100_000])[WARNING_HEADER]) <= MAX_WARNING_BYTES


def test_only_what_has_room_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    printable = Mock(wraps=exchange._printable)
    monkeypatch.setattr(exchange, "_printable", printable)
    assert warning_headers(f"field {i}: an unknown field, ignored" for i in range(60_000))
    assert printable.call_count < 100
