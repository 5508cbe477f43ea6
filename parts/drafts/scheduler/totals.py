"""What drafts have brought since the scheduler's start."""

from dataclasses import dataclass, field

from penstock.core.steps.drafts import DraftOutcome
from penstock.ipc.messages import DraftStats

_MEMORY = 0.99  # decay per step, for the recent acceptance rate


@dataclass(slots=True)
class DraftTotals:
    """They survive workers and only grow, except for the time saved."""

    num_steps: int = 0  # steps for which a drafter was asked
    num_guessed: int = 0
    num_accepted: int = 0
    guessed_at: list[int] = field(default_factory=list)  # by position: the first guess of a row, the second, ...
    accepted_at: list[int] = field(default_factory=list)
    draft_us: int = 0
    saved_us: float = 0.0
    _guessed_of_late: float = 0.0
    _accepted_of_late: float = 0.0

    def note(self, outcome: DraftOutcome, saved_us: float) -> None:
        """Count a step with drafts that has returned."""
        self.num_steps += 1
        self.draft_us += outcome.num_draft_us
        self.saved_us += saved_us
        num_guessed = num_accepted = 0
        for guessed, num_tokens in zip(outcome.num_guessed, outcome.num_tokens, strict=True):
            if not guessed:
                continue
            accepted = max(0, num_tokens - 1)
            while len(self.guessed_at) < guessed:
                self.guessed_at.append(0)
                self.accepted_at.append(0)
            for j in range(guessed):
                self.guessed_at[j] += 1
            for j in range(accepted):
                self.accepted_at[j] += 1
            num_guessed += guessed
            num_accepted += accepted
        self.num_guessed += num_guessed
        self.num_accepted += num_accepted
        self._guessed_of_late = self._guessed_of_late * _MEMORY + num_guessed
        self._accepted_of_late = self._accepted_of_late * _MEMORY + num_accepted

    def stats(self, drafter: str, *, is_on: bool) -> DraftStats:
        """Return them as they are sent to the frontends."""
        return DraftStats(
            drafter=drafter,
            is_on=is_on,
            num_steps=self.num_steps,
            num_guessed=self.num_guessed,
            num_accepted=self.num_accepted,
            guessed_at=tuple(self.guessed_at),
            accepted_at=tuple(self.accepted_at),
            acceptance=self._accepted_of_late / self._guessed_of_late if self._guessed_of_late else 0.0,
            draft_us=self.draft_us,
            saved_us=round(self.saved_us),
        )
