"""Why requests wait, with figures, and what all live requests are doing. Computed only on demand.

    no free pages: needs 12, 3 available, 2 rows end in at most about 40 ms
    `--- kind ---'  `------------------- figures -----------------------'

There are few kinds, and the statistics count them (`step_record.py`). Times are estimated from the steps so far and
from the remaining outputs: as many as the policy predicts, if it does, else as many as the requests allow.
"""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from penstock.core.scheduling.admissions import Admissions
from penstock.core.scheduling.step_record import (
    IN_LINE,
    JUST_CAME,
    ON_TRIAL,
    SIBLING,
    Blocked,
    count_text,
    duration_text,
    waiting_reasons,
)
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.steps.prefill_pace import PrefillPace
from penstock.ipc.messages import ListRequests, RequestList, RequestState, SequenceStatus

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler

PAUSED = "paused: its client does not read"


class Reasons:
    """A snapshot of one scheduler; made on demand, and then dropped."""

    def __init__(self, scheduler: "Scheduler", admissions: Admissions, pace: PrefillPace, blocked_by: str) -> None:
        """`blocked_by`: why the head of the queue waited in the last step (a kind of reason)."""
        self._scheduler = scheduler
        self._admissions = admissions
        self._pace = pace
        self._blocked_by = blocked_by
        self._ends: list[tuple[float, int, Sequence]] | None = None  # time, steps, sequence; by time

    def counts(self) -> dict[str, int]:
        """How many sequences wait for each kind of reason."""
        return waiting_reasons(self._scheduler.waiting, self._blocked_by)

    def waiting(self, limit: int) -> Iterator[tuple[Sequence, str]]:
        """Yield the first waiting sequences in the order of their turns, then those set aside, each with its reason.

        O(waiting).
        """
        head = self._scheduler.waiting.head()
        num_before = 0
        for seq in self._scheduler.waiting.first(limit):
            reason = self._aside(seq.request)
            if not reason:
                reason = (
                    self._of_head(seq)
                    if seq is head
                    else f"{IN_LINE}: its turn comes after {count_text(num_before, 'other')}"
                )
                num_before += 1
            yield seq, reason

    def of_requests(self, requests: Collection[Request]) -> dict[Request, str]:
        """Return why the first sequence of each of these requests waits, if one does. O(waiting)."""
        found = {request: PAUSED for request in requests if request.is_paused}
        for seq, reason in self.waiting(self._scheduler.waiting.num_seqs):
            if seq.request in requests:
                found.setdefault(seq.request, reason)
        return found

    def _aside(self, request: Request) -> str:
        if why := self._scheduler.waiting.held().get(request):
            figures = self._scheduler.parts.why.get(why)
            return f"{why}: {more}" if figures is not None and (more := figures(request)) else why
        if not request.is_parked:
            return ""
        if not request.running:
            return f"{ON_TRIAL}: {count_text(len(self._scheduler.suspects), 'request')}"
        first = max(request.running, key=lambda seq: seq.num_settled_tokens)
        return f"{SIBLING}: {first.num_settled_tokens:,} of {request.num_prompt_tokens:,} tokens computed"

    def _of_head(self, seq: Sequence) -> str:
        scheduler = self._scheduler
        kind = self._blocked_by or JUST_CAME
        match kind:
            case Blocked.BUDGET:
                return kind + self._budget()
            case Blocked.NO_ROW:
                num_rows = scheduler.limits.max_num_seqs
                return f"{kind}: {num_rows} of {num_rows} in use{self._next_ends(1)}"
            case Blocked.NO_PAGES:
                needed, available = self._admissions.pages_for(seq)
                ends = self._next_ends(self._rows_for(needed - available))
                return f"{kind}: needs {needed:,}, {available:,} available{ends}"
            case Blocked.NO_PAGES_SINCE:
                return f"{kind}: nobody enters before a row ends{self._next_ends(1)}"
        return kind

    def _budget(self) -> str:
        scheduler = self._scheduler
        if not scheduler.in_flight:
            return ""
        step, most = scheduler.in_flight[-1], scheduler.limits.max_num_batched_tokens
        users = f"{count_text(len(step.decodes.seqs), 'decode')} and {count_text(len(step.chunks), 'prompt')}"
        limit = (
            f", with --max-prefill-ms {scheduler.step_size.options.max_prefill_ms}" if step.num_tokens < most else ""
        )
        return f": {step.num_tokens:,} of {most:,} used by {users}{limit}"

    # --- when rows end --------------------------------------------------------------------------

    def ends(self) -> list[tuple[float, int, Sequence]]:
        """Return after how many microseconds (0: unknown) and steps each running sequence ends; the next one first."""
        if self._ends is None:
            pace = self._pace
            running = list(self._scheduler.running)
            step_us = pace.decodes_us(len(running), sum(seq.num_tokens for seq in running)) if pace.is_known else 0.0
            self._ends = []
            for seq in running:
                num_left = self._num_outputs_left(seq)
                num_prompt = max(0, seq.num_tokens - 1 - seq.num_computed_tokens)
                prompt_us = pace.chunk_us(seq.num_computed_tokens, num_prompt) if num_prompt and step_us else 0.0
                self._ends.append((num_left * step_us + prompt_us, num_left + (num_prompt > 0), seq))
            self._ends.sort(key=lambda end: end[:2])
        return self._ends

    def _num_outputs_left(self, seq: Sequence) -> int:
        most = max(1, seq.max_len - seq.num_tokens)
        predicted = self._scheduler.policy.predicted_outputs(seq.request)
        return most if predicted is None else min(most, max(1, round(predicted) - seq.num_outputs))

    def _rows_for(self, num_pages: int) -> int:
        """How many rows must end, the next ones first, to give back that many pages."""
        pool, num_rows = self._scheduler.kv.pool, 0
        for _, _, seq in self.ends():
            if num_pages <= 0:
                break
            tables = (seq.page_ids, *(table.page_ids for table in seq.window_tables))
            num_pages -= sum(pool.num_users(page_id) == 1 for table in tables for page_id in table)
            num_rows += 1
        return num_rows

    def _next_ends(self, num_rows: int) -> str:
        """When that many rows will have ended; empty if there are fewer."""
        ends = self.ends()
        if not 0 < num_rows <= len(ends):
            return ""
        us, num_steps, seq = ends[num_rows - 1]
        about = "about" if self._scheduler.policy.predicted_outputs(seq.request) is not None else "at most about"
        who = "the next one ends" if num_rows == 1 else f"{num_rows} rows end"
        return (
            f", {who} in {about} {duration_text(us)}" if us else f", {who} in {about} {count_text(num_steps, 'step')}"
        )


def late_reasons(scheduler: "Scheduler", now: float, seconds: float, most: int) -> dict[Request, str]:
    """Note, once each, why requests have had no row for `seconds`; return those newly noted, at most `most`."""
    late: list[Request] = []
    for request in scheduler.requests.values():
        if request.arrived and request.is_new and not request.waited_for and now - request.arrived > seconds:
            late.append(request)
            if len(late) == most:
                break
    reasons = scheduler.reasons().of_requests(dict.fromkeys(late)) if late else {}
    for request, reason in reasons.items():
        request.waited_for = reason
    return reasons


def list_requests(scheduler: "Scheduler", question: ListRequests, now: float) -> RequestList:
    """Return what the live sequences are doing: those that run, that wait (by their turns), and that are paused."""
    found: list[SequenceStatus] = []
    asked, waiting = question.state, scheduler.waiting
    if asked in ("", "running"):
        found += [_status(seq, "running", "", now) for seq in scheduler.running]
    if asked in ("", "waiting"):
        found += [_status(seq, "waiting", reason, now) for seq, reason in scheduler.reasons().waiting(waiting.num_seqs)]
    if asked in ("", "paused"):
        paused = [request for request in scheduler.requests.values() if request.is_paused]
        found += [_status(seq, "paused", PAUSED, now) for request in paused for seq in request.waiting]
    if question.request_id:
        found = [status for status in found if question.request_id in status.request_id]
    counts = len(scheduler.running), waiting.num_seqs, waiting.num_paused_requests
    return RequestList(question.number, tuple(found[: question.most]), len(found) > question.most, *counts)


def _status(seq: Sequence, state: RequestState, reason: str, now: float) -> SequenceStatus:
    request = seq.request
    return SequenceStatus(
        seq.request_id,
        seq.sequence_idx,
        state,
        reason,
        request.tenant,
        max(0.0, now - request.arrived) if request.arrived else -1.0,
        request.num_prompt_tokens,
        seq.num_outputs,
        seq.max_len - request.num_prompt_tokens,
        seq.num_computed_tokens,
        max(0, seq.num_cached_tokens),
        len(seq.page_ids) + sum(len(table.page_ids) for table in seq.window_tables),
        seq.row,
        0 if seq.account is None else seq.account.num_preemptions,
    )
