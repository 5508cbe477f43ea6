"""Prompt lookup against a search by hand, and what it takes at long contexts."""

import time
from itertools import takewhile
from random import Random

import numpy as np
import pytest

from penstock.parts.drafts.worker.lookup.ngram import following, last_ngram_before


def by_hand(tokens: list[int], least: int, most: int) -> tuple[list[int], int]:
    """The longest n-gram at the end that was there before: where its followers are, and its size."""
    for size in range(min(most, len(tokens) - 1), least - 1, -1):
        end = tokens[-size:]
        if places := [i for i in range(size, len(tokens)) if tokens[i - size : i] == end]:
            return places, size
    return [], 0


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_ngram_is_found(seed: int) -> None:
    rng = Random(seed)
    tokens = [rng.randrange(rng.choice([2, 3, 8])) for _ in range(rng.choice([5, 60, 400]))]
    for least, most in ((1, 1), (1, 4), (2, 4), (3, 3), (2, 64)):
        places, size = last_ngram_before(np.array(tokens, dtype=np.int32), least, most)
        expected = by_hand(tokens, least, most)
        assert (places.tolist(), size) == expected


@pytest.mark.parametrize(
    ("tokens", "places", "most", "share", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [2], 3, 0.0, [3, 4, 1]),
        ([5, 7, 5, 8, 5, 7, 5], [1, 3, 5], 2, 0.0, [7, 5]),  # twice 7, once 8
        ([5, 7, 1, 5, 8, 2, 5], [1, 4], 2, 0.0, [8, 2]),  # once each: the latest
        ([5, 7, 1, 5, 8, 2, 5], [1, 4], 2, 0.6, []),  # a half each is too little
        ([5, 7, 1, 5, 7, 2, 5], [1, 4], 3, 0.6, [7]),  # then they differ
        ([1, 2, 1, 2], [2], 5, 0.0, [1, 2, 1, 2, 1]),  # what is told goes on as it is repeated
        ([9, 9], [1], 4, 0.0, [9, 9, 9, 9]),
        ([5, 7, -1, 5, 8, 8, 8, 8], [1], 3, 0.0, [7]),  # a text ends
        ([5, -1, 5, 8, 5, -1, 4], [1, 3, 5], 3, 0.0, []),  # two of three ended there
    ],
)
def test_the_most_frequent_continuation_is_told(
    tokens: list[int], places: list[int], most: int, share: float, expected: list[int]
) -> None:
    assert following(np.array(tokens, dtype=np.int32), np.array(places), most, share) == expected


def test_all_that_follows_is_told_where_a_text_is_copied() -> None:
    rng = Random(0)
    text = [rng.randrange(1000) for _ in range(400)]
    told = 0
    tokens = [*text, 2000, *text[:3]]
    while len(tokens) < 2 * len(text):
        known = np.array(tokens, dtype=np.int32)
        guesses = following(known, last_ngram_before(known, 2, 32)[0], 8)
        expected = text[len(tokens) - len(text) - 1 :][:8]
        right = len([*takewhile(lambda pair: pair[0] == pair[1], zip(guesses, expected, strict=False))])
        told += right
        tokens += expected[: right + 1]
    assert told > 0.85 * len(text)


def test_a_long_context_is_searched_in_far_less_than_a_step() -> None:
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.2, 32768), 50_000).astype(np.int32)  # words of a text, about
    for end in ([1], tokens[1000:1064]):  # the most frequent one, a fifth of all; what was there before
        tokens[-len(end) :] = end
        times = []
        for _ in range(50):
            began = time.thread_time()
            places, _ = last_ngram_before(tokens, 2, 32)
            if places.shape[0]:
                following(tokens, places, 8)
            times.append(time.thread_time() - began)
        assert min(times) < 1e-3  # it is about 50 us; a step reads thousands of times as many bytes
