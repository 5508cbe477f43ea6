"""The input of custom tools: out of a model's arguments, however they are written and cut."""

import json
import random

import pytest

from penstock.frontend.parsing.custom_input import CustomInputs, arguments_of
from penstock.frontend.parsing.parts import CallArguments, CallInput, CallStart, Content, Part

TEXTS = [
    "",
    "a",
    'say "hi"\n\tC:\\new',
    "Tromsø 🙂 \x01\x7f",
    "{}",
    '{"input": "x"}',
    "\\",
    '"',
    "\\u0041",
    "\ud800 \udc00"[1:2],
]


def read(pieces: list[str], name: str = "run") -> str:
    reader = CustomInputs({"run"})
    parts: list[Part] = [CallStart(0, "c", name)]
    found = reader.read(parts)
    assert found == [CallStart(0, "c", name, is_custom=name == "run")]
    for piece in pieces:
        found += reader.read([CallArguments(0, piece)])
    found += reader.read([], is_final=True)
    return "".join(part.text for part in found if isinstance(part, CallInput | CallArguments))


def cuts(text: str) -> list[list[str]]:
    draw = random.Random(text)
    ways = [[text], [*text]]
    for _ in range(8):
        places = sorted(draw.randrange(len(text) + 1) for _ in range(3))
        ways.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return ways


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("is_ascii", [False, True])
def test_what_was_put_in_comes_out(text: str, is_ascii: bool) -> None:
    written = json.dumps(arguments_of(text), ensure_ascii=is_ascii)
    for pieces in cuts(written):
        assert read(pieces) == text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"input": "a\nb"}', "a\nb"),  # a line break that should have been escaped
        ('{ "input" :\n"a\\/b\\q"}', "a/bq"),
        ('{"input": "cut off', "cut off"),
        ('{"input": "half\\', "half\\"),
        ('{"input": "half\\u00', "half\\u00"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"input": "\\ud83d\\u0041"}', "\ufffdA"),
        ('{"input": "\\ud83d', "\\ud83d"),
        ('{"input": "\\uzz"}', "\\uzz"),
        ('{"input": "a"} and more', "a"),
        ('{"patch": "x"}', "x"),
        ('{"a": 1, "input": "x"}', "x"),
        ('{"a": 1}', '{"a": 1}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ("{" + " " * 80 + '"input": "x"}', "x"),
        ('{"input": 5}', '{"input": 5}'),
        ('"text"', "text"),
        ("free text", "free text"),
        ("{}", ""),
        ("", ""),
    ],
)
def test_what_models_write_instead(written: str, text: str) -> None:
    for pieces in cuts(written):
        assert read(pieces) == text


def test_other_calls_stay_as_they_are() -> None:
    assert read(['{"input": "x"}'], name="other") == '{"input": "x"}'


def test_calls_end_where_the_next_part_begins() -> None:
    reader = CustomInputs({"run"})
    found = reader.read(
        [CallStart(0, "a", "run"), CallArguments(0, "{"), CallStart(1, "b", "run"), CallArguments(1, "raw")]
    )
    found += reader.read([Content("!")], is_final=True)
    assert [part for part in found if not isinstance(part, CallStart)] == [
        CallInput(0, "{"),
        CallInput(1, "raw"),
        Content("!"),
    ]


def test_an_input_is_streamed_as_it_comes() -> None:
    reader = CustomInputs({"run"})
    reader.read([CallStart(0, "a", "run")])
    told = [reader.read([CallArguments(0, piece)]) for piece in ('{"inp', 'ut": "ab', "c\\", 'n"}')]
    assert told == [[], [CallInput(0, "ab")], [CallInput(0, "c")], [CallInput(0, "\n")]]


def test_what_does_not_begin_as_expected_is_read_once() -> None:
    """A model that goes on with white space for ever must not take more and more time for each piece."""
    reader = CustomInputs({"run"})
    reader.read([CallStart(0, "c", "run")])
    for _ in range(100):
        assert not reader.read([CallArguments(0, " " * 64)])
    call = reader._open
    assert call is not None
    assert len(call._held) <= 128
    found = reader.read([CallArguments(0, '{"input": "a"}')])
    assert [*found, *reader.read([], is_final=True)] == [CallInput(0, "a")]
