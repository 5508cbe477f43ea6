"""Log-probabilities: from the engine's columns to one entry per token, released together with the text.

    delta.logprobs --read_scores--> TokenScore --HeldScores--> ShownToken, in the event with its text

A token's entry is held back as long as its text is: until a character is complete, or because the text may become a
stop string. At the end of a sequence every sampled token has its entry, just as it has its id in `token_ids`. That
includes the tokens of a stop string, and the stop token.
"""

import struct
from collections import deque
from typing import NamedTuple

from penstock.ipc.messages import TokenLogprobs


class TokenScore(NamedTuple):
    """One token's log-probability and those of the most likely tokens at its position, best first."""

    token_id: int
    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...]


class ShownToken(NamedTuple):
    """A token whose text has been released."""

    score: TokenScore
    offset: int  # characters of the sequence's text before it


def read_scores(table: TokenLogprobs) -> list[TokenScore]:
    """One entry per token.

    Raises:
        ValueError: if the columns differ in length.
    """
    count = len(table.ranks) // 4
    if not count:
        return []
    width, rest = divmod(len(table.token_ids), 4 * count)
    if rest or not width or len(table.logprobs) != len(table.token_ids) or len(table.ranks) % 4:
        raise ValueError("columns of log-probabilities differ in length")
    ids = struct.unpack(f"<{count * width}i", table.token_ids)
    values = struct.unpack(f"<{count * width}f", table.logprobs)
    ranks = struct.unpack(f"<{count}i", table.ranks)
    return [
        TokenScore(
            ids[start],
            values[start],
            rank,
            tuple(zip(ids[start + 1 : start + width], values[start + 1 : start + width], strict=True)),
        )
        for start, rank in zip(range(0, count * width, width), ranks, strict=True)
    ]


def num_scored(pieces: list[TokenLogprobs]) -> int:
    """Return how many tokens the pieces contain."""
    return sum(len(table.ranks) for table in pieces) // 4


class HeldScores:
    """One sequence's entries that are not released yet."""

    __slots__ = ("_ends", "_held", "_num_characters")

    def __init__(self) -> None:
        self._held: deque[ShownToken] = deque()
        self._ends: deque[int] = deque()  # how long the shown text must be to release each entry, as far as known
        self._num_characters = 0

    def take(self, score: TokenScore, text: str) -> None:
        """Take a token and the characters that it completes; if there are none, it is released with the next ones."""
        self._held.append(ShownToken(score, self._num_characters))
        if text:
            self._num_characters += len(text)
            self._ends.extend([self._num_characters] * (len(self._held) - len(self._ends)))

    def release(self, num_shown: int) -> list[ShownToken]:
        """Release the entries whose text is within the first `num_shown` characters."""
        released = []
        while self._ends and self._ends[0] <= num_shown:
            self._ends.popleft()
            released.append(self._held.popleft())
        return released

    def release_all(self) -> list[ShownToken]:
        """Release all entries: the sequence has ended."""
        released = list(self._held)
        self._held.clear()
        self._ends.clear()
        return released


def mean_logprob(scores: list[ShownToken]) -> float:
    """The mean per token, so that a longer text is not worse for its length; an empty one is the worst."""
    return sum(token.score.logprob for token in scores) / len(scores) if scores else float("-inf")
