"""What the scheduler does for a worker that drafts tokens: it says how many, and learns from what came of them."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from penstock.core.scheduling.part import SchedulerPart
from penstock.core.scheduling.results import sampling_rows, time_of
from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.drafts import DraftOutcome, DraftRoom
from penstock.core.steps.plan_builder import InFlightStep
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import DraftStats, StepResult
from penstock.parts.drafts.scheduler.adaptive import draft_lengths
from penstock.parts.drafts.scheduler.forced_lengths import ForcedLengths
from penstock.parts.drafts.scheduler.lengths import DraftLengths, FixedLengths
from penstock.parts.drafts.scheduler.totals import DraftTotals

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler


class Drafting(SchedulerPart):
    """How many tokens are drafted for each row, and what drafts have brought. It survives workers."""

    __slots__ = ("_errors", "_scheduler", "lengths", "totals")

    stats_field = "drafts"

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self | None:
        if not scheduler.limits.drafter:
            return None
        part = before or cls(scheduler)
        part._follow()
        return part

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._errors: list[str] = []  # of the drafter, until they are logged
        self.lengths: DraftLengths = FixedLengths(0)
        self.totals = DraftTotals()

    def _follow(self) -> None:
        """Another worker has come."""
        limits, before = self._scheduler.limits, self.lengths
        if isinstance(before, ForcedLengths):
            before = before.others
        lengths, are_only_forced = draft_lengths(limits.max_drafts, before), limits.drafter == "grammar"
        self.lengths = ForcedLengths(lengths, limits.max_drafts, are_only_forced=are_only_forced)

    # --- a step -----------------------------------------------------------------------------

    def num_drafts(self, decodes: ListOf[Sequence], room: DraftRoom) -> ListOf[int]:
        return self.lengths.lengths(decodes, room)

    @property
    def why_drafts(self) -> str:
        return self.lengths.why

    def drafts_us(self, num_drafts: ListOf[int]) -> float:
        return self.lengths.guesses_us(sum(num_drafts), max(num_drafts))

    def stepped(self, step: InFlightStep, result: StepResult, outcome: DraftOutcome | None) -> None:
        """Learn from a step."""
        lengths = self.lengths
        if outcome is not None:
            self.totals.note(outcome, lengths.saved_us(outcome))
            lengths.note(outcome)
        elif step.decodes.seqs and not step.chunks:
            lengths.note_plain(len(step.decodes.seqs), step.num_context, time_of(result))

    def applied(self, step: InFlightStep, result: StepResult) -> None:
        """Note which sequences' next tokens their grammars force, and whether the drafter has failed."""
        if result.num_forced and isinstance(self.lengths, ForcedLengths):
            for seq, num_forced in _forced_rows(step, result):
                self.lengths.forced(seq, num_forced)
        if result.drafter_error:
            self._stop(result.drafter_error)

    def _stop(self, error: str) -> None:
        """The drafter has failed: no more drafts. Those in flight still count."""
        self.lengths = FixedLengths(0)
        self._errors.append(error)
        self._scheduler.limits = replace(self._scheduler.limits, max_drafts=0)

    # --- figures ----------------------------------------------------------------------------

    def take_errors(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        if not self._errors:
            return ()
        errors, self._errors = self._errors, []
        return [("drafter disabled", {"drafter": self._scheduler.limits.drafter, "reason": error}) for error in errors]

    def stats(self) -> DraftStats:
        limits = self._scheduler.limits
        return self.totals.stats(limits.drafter, is_on=limits.max_drafts > 0)


def _forced_rows(step: InFlightStep, result: StepResult) -> list[tuple[Sequence, int]]:
    """Return the sequences whose next tokens are forced, with how many; call this after applying the result."""
    num_forced = unpack_int32(result.num_forced).tolist()
    rows = zip(sampling_rows(step), num_forced, strict=False)
    return [(seq, count) for (seq, epoch), count in rows if count > 0 and seq.running_epoch == epoch]
