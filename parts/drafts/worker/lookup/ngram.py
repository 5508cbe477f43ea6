"""Prompt lookup: guess what followed the last few tokens at an earlier place in the same sequence.

Source: Saxena, "Prompt Lookup Decoding" (2023). Here the longest n-gram counts, and each of several places where it
occurred has a vote on what comes next. A sequence is searched from its beginning each time. The search reads 4 bytes a
token, and the model's own step thousands, so an index would cost more than it saves.
"""

from collections import Counter
from itertools import chain

import numpy as np
import numpy.typing as npt

from penstock.gpu_worker.state.row_state import RowState
from penstock.parts.drafts.worker.drafter import Drafter, Guesses, Int32Array, Traits

Places = npt.NDArray[np.int64]

_FEW = 32
"""With more places than this, those that do not match the next token before are dropped, one token at a time."""

_MAX_VOTES = 32
"""How many of the latest places vote: more take time, and seldom change the result."""


class NgramDrafter(Drafter):
    """Looks for the longest n-gram at a sequence's end that occurred before."""

    traits = Traits(guesses_ahead=True)

    def __init__(self, state: RowState, min_tokens: int, max_tokens: int) -> None:
        """N-grams of `min_tokens` to `max_tokens` tokens."""
        self._state = state
        self._min_tokens, self._max_tokens = min_tokens, max_tokens

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """See `Drafter`."""
        asked = zip(rows.tolist(), positions.tolist(), most.tolist(), strict=True)
        found = [self._guess_one(row, self._state.host_tokens(row)[: last + 1], count) for row, last, count in asked]
        return Guesses(np.array([*map(len, found)], dtype=np.int32), np.array([*chain(*found)], dtype=np.int32))

    def _guess_one(self, row: int, tokens: Int32Array, most: int) -> list[int]:
        """What may follow a row's tokens; at most `most` of them."""
        places, _ = last_ngram_before(tokens, self._min_tokens, self._max_tokens)
        return following(tokens, places, most) if places.shape[0] else []


def last_ngram_before(tokens: Int32Array, min_size: int, max_size: int) -> tuple[Places, int]:
    """Find the longest n-gram at the end of a sequence that occurred earlier in it.

    Args:
        tokens: int32[T], at least one.
        min_size: least size of the n-gram in tokens, at least 1.
        max_size: largest size of the n-gram.

    Returns:
        int64[P], ascending, the places right after its earlier occurrences, all below T; and its size. If there is no
        such n-gram, P and the size are 0.
    """
    last = tokens.shape[0] - 1
    places = np.flatnonzero(tokens[:last] == tokens[last])
    size = 1
    while places.shape[0] > _FEW and size < max_size:
        inner = places[places.searchsorted(size) :]  # the others are too near the sequence's beginning
        longer = inner[tokens[inner - size] == tokens[last - size]]
        if not longer.shape[0]:
            return (places + 1, size) if size >= min_size else (longer, 0)
        places, size = longer, size + 1
    if not places.shape[0]:
        return places, 0
    places, size = longest_match(tokens, places, tokens[-min(max_size, last) :])
    return (places + 1, size) if size >= min_size else (places[:0], 0)


def longest_match(text: Int32Array, places: Places, end: Int32Array) -> tuple[Places, int]:
    """Choose the places before which a text matches the longest part of an end.

    Args:
        text: int32[T].
        places: int64[P], P >= 1, in the text.
        end: int32[n].

    Returns:
        int64[P'], the chosen places in their order; and the size of the part in tokens.
    """
    back = np.arange(end.shape[0])
    before = places[:, None] - back
    differs = text[np.maximum(before, 0)] != end[::-1]
    differs |= before < 0
    sizes = np.where(differs.any(axis=1), differs.argmax(axis=1), end.shape[0])
    size = int(sizes.max())
    return places[sizes == size], size


def following(tokens: Int32Array, places: Places, most: int, min_share: float = 0.0) -> list[int]:
    """Return what most often follows, token by token. Among equally frequent tokens the latest wins.

    Args:
        tokens: int32[T]; a negative one ends a text, and nothing follows it.
        places: int64[P], P >= 1, ascending and below T: each begins a text that runs to its end.
        most: tokens to return at most.
        min_share: the result ends before a token on which a smaller share of the places agrees.
    """
    texts = [tokens[place : place + most].tolist() for place in places[-_MAX_VOTES:].tolist()]
    least = min_share * len(texts)
    told: list[int] = []
    while (at := len(told)) < most:
        texts = [text for text in texts if len(text) > at]
        if not texts:  # the last text is used up: go on as if it repeated for ever
            return (told * -(-most // at))[:most]
        token = texts[-1][at]
        if len(texts) > 1:
            token, count = Counter([text[at] for text in reversed(texts)]).most_common(1)[0]
            if count < len(texts):
                texts = [text for text in texts if text[at] == token]
        if token < 0 or len(texts) < least:
            break
        told.append(token)
    return told
