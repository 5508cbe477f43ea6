"""Stop strings: the same result however the text is cut."""

import random
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontend.text.stop_strings import StopMatcher, StopStrings
from penstock.frontend.validation.common import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from tests.frontend.fake_scheduler import Script
from tests.frontend.http_client import chat, chat_text, complete, completion_text, events
from tests.frontend.live_server import LiveServer


def run(pieces: list[str], stops: tuple[str, ...], include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(stops, include_stop=include_stop))
    shown = ""
    for piece in pieces:
        visible, stop = matcher.feed(piece)
        shown += visible
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def oracle(text: str, stops: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """The stop string that is complete first; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def cut(text: str, borders: list[int]) -> list[str]:
    edges = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("aab\u00e9\U0001f600", max_size=40),
    stops=st.lists(st.text("aab\u00e9\U0001f600", min_size=1, max_size=6), min_size=1, max_size=4),
    borders=st.lists(st.integers(0, 1000), max_size=12),
    include_stop=st.booleans(),
)
def test_any_cut_gives_the_oracles_result(text: str, stops: list[str], borders: list[int], include_stop: bool) -> None:
    expected = oracle(text, tuple(stops), include_stop)
    assert run(cut(text, borders), tuple(stops), include_stop) == expected
    assert run(list(text), tuple(stops), include_stop) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_nothing_is_held_back_without_need(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(tuple(stops)))
    shown = ""
    for position, character in enumerate(text, start=1):
        visible, stop = matcher.feed(character)
        shown += visible
        if stop is not None:
            return
        held = text[len(shown) : position]
        could_begin = [
            k for k in range(1, position + 1) if any(s.startswith(text[position - k : position]) for s in stops)
        ]
        assert len(held) == max(could_begin, default=0)


class _Counted(StopStrings):
    """Counts the steps that are tried."""

    num_tried = 0

    def _step(self, state: int, character: int) -> int:
        _Counted.num_tried += 1
        return super()._step(state, character)


def test_a_character_costs_the_same_with_many_stop_strings() -> None:
    """Strings that all nearly match, many times over: a few steps a character with one or a thousand."""
    counts = []
    for num_stops in (1, 1000):
        strings = _Counted(tuple("a" * 24 + chr(ord("b") + i) * 2 for i in range(num_stops)))
        matcher = StopMatcher(strings)
        _Counted.num_tried = 0
        shown = "".join(matcher.feed("a" * 4)[0] for _ in range(1000))
        assert shown == "a" * (4000 - 24)
        counts.append(_Counted.num_tried)
    assert counts[0] == counts[1] < 4 * 4000


@pytest.mark.parametrize("num_stops", [1, 16, MAX_STOP_STRINGS])
def test_a_request_that_waits_holds_little(num_stops: int) -> None:
    """A few times the stop strings themselves, which may be of two bytes a character."""
    draw = random.Random(num_stops)
    num_characters = MAX_STOP_CHARACTERS // num_stops
    stops = tuple("".join(chr(draw.randrange(0x4E00, 0x9000)) for _ in range(num_characters)) for _ in range(num_stops))
    tracemalloc.start()
    try:
        strings = StopStrings(stops)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 512 << 10
    assert StopMatcher(strings).feed("x" + stops[-1]) == ("x", stops[-1])


def test_across_tokens_and_chunks(live: LiveServer) -> None:
    text = "The gate opens slowly, and the river waits behind it."
    ids = live.tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(5)
    for _ in range(12):
        begin = rng.randrange(1, len(text) - 8)
        stop = text[begin : begin + rng.randrange(2, 8)]
        expected = text[: text.index(stop)]
        live.gives(ids, per_step=rng.randrange(1, 4), hangs=True)
        fields: dict[str, Any] = {"stop": [stop, "zebra"], "max_tokens": 100}
        found = events(chat(live, stream=True, **fields))
        assert chat_text(found) == expected
        assert found[-2]["choices"][0]["finish_reason"] == "stop"
        assert found[-2]["choices"][0]["stop_reason"] == stop
        answer = chat(live, **fields).json()["choices"][0]
        assert (answer["message"]["content"], answer["stop_reason"]) == (expected, stop)
        included = complete(live, include_stop_str_in_output=True, **fields).json()["choices"][0]
        assert included["text"] == expected + stop
    live.wait_until(lambda: len(live.scheduler.aborted) == 36)


def test_usage_and_ids_end_at_the_stop(live: LiveServer) -> None:
    ids = live.tokenizer.encode("Water runs down the pipe", add_special_tokens=False)
    live.gives(ids, per_step=len(ids), hangs=True)
    answer = chat(live, stop=" runs", return_token_ids=True).json()
    last = 1 + next(i for i in range(len(ids)) if "runs" in live.tokenizer.decode(ids[: i + 1]))
    assert answer["choices"][0]["token_ids"] == ids[:last]
    assert answer["usage"]["completion_tokens"] == last


def test_only_the_sequence_that_stops_is_aborted(live: LiveServer) -> None:
    ids = live.tokenizer.encode("Water runs down the pipe", add_special_tokens=False)
    other = live.tokenizer.encode("The gate opens", add_special_tokens=False)
    live.plays(lambda request, i: Script(ids, hangs=True) if i == 1 else Script(other))
    found = events(complete(live, stop=" down", n=3, stream=True, max_tokens=64))
    assert [completion_text(found, i) for i in range(3)] == ["The gate opens", "Water runs", "The gate opens"]
    live.wait_until(lambda: [abort.sequence_idx for abort in live.scheduler.aborted] == [1])


def test_min_tokens_are_not_searched(live: LiveServer) -> None:
    live.says("Water runs, Water runs, Water")
    num_first = len(live.tokenizer.encode("Water runs,", add_special_tokens=False))
    answer = complete(live, stop="runs", min_tokens=num_first, max_tokens=100).json()
    assert answer["choices"][0]["text"] == "Water runs, Water "


def test_held_back_text_comes_at_the_end(live: LiveServer) -> None:
    live.says("Water runs")
    answer = complete(live, stop="runs away", max_tokens=100).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("Water runs", "stop", None)
    found = events(complete(live, stop="runs away", max_tokens=100, stream=True))
    assert completion_text(found) == "Water runs"
