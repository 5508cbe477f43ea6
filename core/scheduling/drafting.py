"""What the scheduler does for a worker that drafts tokens: it says how many, and learns from what came of them."""

from collections.abc import Sequence as ListOf

from penstock.core.scheduling.draft_totals import DraftTotals
from penstock.core.scheduling.results import draft_outcome, forced_rows, time_of
from penstock.core.sequences.limits import WorkerLimits
from penstock.core.steps.draft_lengths import draft_lengths
from penstock.core.steps.drafts import DraftLengths, DraftOutcome, FixedLengths
from penstock.core.steps.forced_lengths import ForcedLengths
from penstock.core.steps.plan_builder import InFlightStep
from penstock.ipc.messages import StepResult


class Drafting:
    """How many tokens are drafted for each row, and what drafts have brought. It survives workers."""

    def __init__(self) -> None:
        self.lengths: DraftLengths | None = None  # None: the worker has no drafter
        self.totals = DraftTotals()
        self.of_last = 0, 0  # tokens drafted and accepted in the last step that has returned

    def follow(self, limits: WorkerLimits) -> None:
        """Another worker has come."""
        before = self.lengths.others if isinstance(self.lengths, ForcedLengths) else self.lengths
        lengths = draft_lengths(limits.max_drafts, before)
        are_only_forced = limits.drafter == "grammar"
        self.lengths = lengths and ForcedLengths(lengths, limits.max_drafts, are_only_forced=are_only_forced)

    def stop(self) -> None:
        """The drafter has failed: no more drafts. Those in flight still count."""
        self.lengths = FixedLengths(0)

    def added_us(self, num_drafts: ListOf[int]) -> float:
        """Return the microseconds that these drafts, so many for each row, add to a step."""
        lengths = self.lengths
        return 0.0 if lengths is None else lengths.guesses_us(sum(num_drafts), max(num_drafts))

    def returned(self, step: InFlightStep, result: StepResult, counts: list[int]) -> DraftOutcome | None:
        """Learn from a step; return what came of its drafts, if it had any. `counts`: those of `checked_tokens`."""
        lengths = self.lengths
        assert lengths is not None
        if step.num_drafts:
            outcome = draft_outcome(step, result, counts)
            self.of_last = self.totals.note(outcome, lengths.saved_us(outcome))
            lengths.note(outcome)
            return outcome
        self.of_last = 0, 0
        if not step.chunks:
            lengths.note_plain(len(step.decodes.seqs), step.num_context, time_of(result))
        return None

    def forced(self, step: InFlightStep, result: StepResult) -> None:
        """Note which sequences' next tokens their grammars force, after the result was applied."""
        if isinstance(self.lengths, ForcedLengths):
            for seq, num_forced in forced_rows(step, result):
                self.lengths.forced(seq, num_forced)
