"""How many tokens are guessed for each row: what all ways to decide it have in common."""

from collections.abc import Sequence as ListOf
from typing import Protocol

from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.drafts import DraftOutcome, DraftRoom


class DraftLengths(Protocol):
    """Decides how many tokens are guessed."""

    why: str
    """The reason for the last answer, for the step trace."""

    def lengths(self, decodes: ListOf[Sequence], room: DraftRoom) -> ListOf[int]:
        """Return how many tokens may be guessed for each of these decodes in the next step; empty: none."""

    def note(self, outcome: DraftOutcome) -> None:
        """A step with drafts has returned."""

    def saved_us(self, outcome: DraftOutcome) -> float:
        """Estimate how much longer the step's tokens would have taken without guesses; call this before `note`."""

    def guesses_us(self, num_guesses: int, longest: int) -> float:
        """Estimate what this many guesses, `longest` of them in one row, add to a step."""

    def note_plain(self, num_rows: int, num_context: int, num_us: int) -> None:
        """A step of decodes without guesses has returned; `num_us` as in `DraftOutcome`."""


class FixedLengths(DraftLengths):
    """The same number for every row, always."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self.why = "fixed"

    def lengths(self, decodes: ListOf[Sequence], room: DraftRoom) -> ListOf[int]:
        """Return the same number for each row, the first rows first, as far as there is room."""
        most = room.num_tokens
        if not self._num_drafts:
            return ()
        if self._num_drafts * len(decodes) <= most:
            return [self._num_drafts] * len(decodes)
        lengths = []
        for _ in decodes:
            lengths.append(min(self._num_drafts, most))
            most -= lengths[-1]
        return lengths

    def note(self, outcome: DraftOutcome) -> None:
        """Ignore the step: nothing is learned."""

    def saved_us(self, outcome: DraftOutcome) -> float:
        """Return 0: nothing is learned."""
        return 0.0

    def guesses_us(self, num_guesses: int, longest: int) -> float:
        """Return 0: nothing is learned."""
        return 0.0

    def note_plain(self, num_rows: int, num_context: int, num_us: int) -> None:
        """Ignore the step: nothing is learned."""
