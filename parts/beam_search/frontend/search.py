"""The search itself: from the best continuations of each beam to the next beams. It knows no engine.

The rules are those of transformers' `generate(num_beams=...)`, for one prompt:

- Among all continuations of all beams, the first `width` may end: those with a stop token are finished, and at the full
  length all are. The best `width` that do not end are the next beams.
- A finished sequence is worth its log-probability divided by its length (with the stop token) to the power of the
  length penalty. The best `width` are kept.
- The search ends when `width` are finished and the best beam cannot do better than the worst of them, as far as that
  is estimated: with `early_stopping` at once; otherwise by what the beam would be worth now, or with "never" by the
  most that it could be worth at the full length.

Sums are rounded to fp32 as there, so that equally good sequences have the same order.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple


class Scored(NamedTuple):
    """A token with its log-probability, and the place of that among all tokens."""

    token_id: int
    logprob: float
    rank: int  # from 1 on


class Beam(NamedTuple):
    """A sequence of outputs."""

    tokens: tuple[Scored, ...] = ()
    best: tuple[tuple[Scored, ...], ...] = ()  # the best tokens at the same positions
    score: float = 0.0  # the sum of its log-probabilities
    has_stopped: bool = False  # at its last token

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its outputs."""
        return tuple(token.token_id for token in self.tokens)


class Search:
    """One prompt's search."""

    def __init__(
        self,
        width: int,
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        *,
        min_tokens: int = 0,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> None:
        """`early_stopping` is true, false or "never"."""
        self._width = width
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stops = frozenset(stop_token_ids)
        self._penalty = length_penalty
        self._early = early_stopping
        self._finished: list[tuple[float, Beam]] = []  # with what each is worth, best first
        self.beams: list[Beam] = [Beam()]
        """Those to continue, best first; empty once the search has ended."""

    @property
    def num_best(self) -> int:
        """How many of the best tokens after each beam `advance` needs: `width` of them may be no stop tokens."""
        return self._width + len(self._stops)

    @property
    def found(self) -> list[Beam]:
        """The best sequences, best first; `width` of them once the search has ended."""
        return [beam for _, beam in self._finished]

    def advance(self, best: Sequence[Sequence[Scored]]) -> None:
        """Take one step.

        Args:
            best: the best tokens after each of `beams`, best first.
        """
        length = len(self.beams[0].tokens) + 1
        stops = self._stops if length > self._min_tokens else frozenset[int]()
        barred = self._stops - stops
        candidates = [
            (_fp32(beam.score + token.logprob), i, token)
            for i, beam in enumerate(self.beams)
            for token in best[i]
            if token.token_id not in barred
        ]
        candidates.sort(key=lambda each: (-each[0], each[1], each[2].token_id))
        is_last = length >= self._max_tokens
        for score, i, token in candidates[: self._width]:
            if is_last or token.token_id in stops:
                ended = self._continued(i, token, best[i], score, has_stopped=token.token_id in stops)
                self._finished.append((self._worth(score, length), ended))
        self._finished.sort(key=lambda each: -each[0])  # stable: earlier ones come first
        del self._finished[self._width :]
        going_on = [each for each in candidates if each[2].token_id not in stops][: self._width]
        if is_last or not going_on or self._is_decided(going_on[0][0], length):
            self.beams = []
        else:
            self.beams = [self._continued(i, token, best[i], score) for score, i, token in going_on]

    def _continued(
        self, i: int, token: Scored, best: Sequence[Scored], score: float, *, has_stopped: bool = False
    ) -> Beam:
        beam = self.beams[i]
        return Beam((*beam.tokens, token), (*beam.best, tuple(best)), score, has_stopped)

    def _is_decided(self, score: float, length: int) -> bool:
        """Whether the best beam, with this score, cannot be worth more than what is finished."""
        if len(self._finished) < self._width:
            return False
        if self._early is True:
            return True
        if self._early == "never" and self._penalty > 0:
            length = self._max_tokens
        return self._worth(score, length) <= self._finished[-1][0]

    def _worth(self, score: float, length: int) -> float:
        """IEEE's division, in which a divisor that fp32 cannot hold is 0 or infinite."""
        try:
            divisor = _fp32(length**self._penalty)
        except OverflowError:
            divisor = math.inf
        return _fp32(score / divisor) if divisor else -math.inf


def _fp32(number: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded
