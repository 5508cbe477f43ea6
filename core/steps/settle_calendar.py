"""When to look at a decoding sequence again, so that a result need not look at every row."""

from collections.abc import Collection

from penstock.core.sequences.sequence import Sequence

MAX_STEPS_AHEAD = 64


class SettleCalendar:
    """Step id -> sequences for which its result may bring more than a token: a page to cache, the full length.

    A sequence settles one token a step, so it cannot reach its `settle_event` before the step that it is entered for.
    It may be later (it was left out of a step); then it is entered again. A step with drafts is looked at row by row:
    whatever settles more in it is entered anew, for an earlier step.
    """

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: dict[int, list[tuple[Sequence, int]]] = {}

    def enter(self, seq: Sequence, step_id: int) -> None:
        """Look at the sequence again when its settle_event can be reached, counted from the result of `step_id`.

        Or earlier, if that is far off: entries of sequences that end meanwhile should not stay for long.
        """
        # The settled tokens' number and the lesser of two, without calls: with `KVPages`, 4 % of a step of 256 rows.
        num_steps = seq.settle_event - (len(seq.token_ids) - seq.num_unsettled_tokens)
        if num_steps > MAX_STEPS_AHEAD:
            num_steps = MAX_STEPS_AHEAD
        seq.due_step = due_step = step_id + num_steps
        entries = self._due.get(due_step)
        if entries is None:
            self._due[due_step] = [(seq, seq.epoch)]
        else:
            entries.append((seq, seq.epoch))

    def take(self, step_id: int) -> Collection[Sequence]:
        """Return what to look at with the result of this step, each once; entries made void since are dropped."""
        entries = self._due.pop(step_id, None)
        if entries is None:
            return ()
        return {seq: None for seq, epoch in entries if seq.running_epoch == epoch and seq.due_step == step_id}

    def has(self, seq: Sequence) -> bool:
        """Tell whether the sequence will be looked at again; for checks."""
        return (seq, seq.epoch) in self._due.get(seq.due_step, ())
