"""Guesses for the tokens that grammars force: the worker says how many there are, so none is asked for in vain."""

from collections.abc import Sequence as ListOf

from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.drafts import DraftOutcome, DraftRoom
from penstock.parts.drafts.scheduler.lengths import DraftLengths


class ForcedLengths(DraftLengths):
    """As many as `others` says, and at least as many as a row's next forced tokens.

    A forced token must be computed once anyway, now or later, so guessing it pays at any load.
    """

    __slots__ = ("_most", "_until", "are_only_forced", "others", "why")

    def __init__(self, others: DraftLengths, most: int, *, are_only_forced: bool) -> None:
        """`most`: most guesses for a row. If only forced tokens are guessed, `others` just learns their costs."""
        self.others = others
        self.are_only_forced = are_only_forced
        self.why = ""
        self._most = most
        self._until: dict[Sequence, int] = {}  # the position up to which its tokens are forced

    def forced(self, seq: Sequence, num_tokens: int) -> None:
        """A row's grammar forces the `num_tokens` that follow its known tokens."""
        self._until[seq] = len(seq.token_ids) + num_tokens

    def lengths(self, decodes: ListOf[Sequence], room: DraftRoom) -> ListOf[int]:
        """See `DraftLengths`."""
        lengths: ListOf[int] = ()
        self.why = "nothing is forced"
        if not self.are_only_forced:
            lengths = self.others.lengths(decodes, room)
            self.why = self.others.why
        if not self._until:
            return lengths
        for seq, until in list(self._until.items()):
            if seq.row < 0 or seq.num_computed_tokens >= until:
                del self._until[seq]
        left = room.num_tokens - sum(lengths)
        counts = list(lengths) or [0] * len(decodes)
        for i, seq in enumerate(decodes if self._until and left > 0 else ()):
            if seq in self._until:
                num_more = min(self._until[seq] - seq.num_computed_tokens, self._most) - counts[i]
                num_more = max(0, min(num_more, left))
                counts[i] += num_more
                left -= num_more
                self.why = "forced" if num_more else self.why
        return counts if any(counts) else ()

    def note(self, outcome: DraftOutcome) -> None:
        """See `DraftLengths`."""
        self.others.note(outcome)

    def saved_us(self, outcome: DraftOutcome) -> float:
        """See `DraftLengths`."""
        return self.others.saved_us(outcome)

    def guesses_us(self, num_guesses: int, longest: int) -> float:
        """See `DraftLengths`."""
        return self.others.guesses_us(num_guesses, longest)

    def note_plain(self, num_rows: int, num_context: int, num_us: int) -> None:
        """See `DraftLengths`."""
        self.others.note_plain(num_rows, num_context, num_us)
