"""Background work (`Request.is_background`), which no client waits for, beside requests that clients wait for.

It queues behind all other requests (`BACKGROUND`), and is the first to yield rows and pages to them. Beside them it
computes only as much as lengthens a step a little, so that streams hardly notice it. When no other request has a row,
it computes like any other request. Its waiting time is not bounded here; its owner has a bound (a batch's window).
"""

from math import inf

from penstock.core.scheduling.running_set import RunningSet
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.prefill_pace import PrefillPace

_PART = 0.1
"""By what part background work may lengthen a step of other requests."""

_UNKNOWN = 8
"""Background rows beside others if a row was measured to cost nothing."""


def make_room(running: RunningSet, waiting: WaitingQueue, pace: PrefillPace) -> float | None:
    """Set how many background rows may decode in the next step; return the microseconds left for background prompts.

    None: nothing holds them back, because no other request has a row; or there are none.
    """
    if not running.background and ((head := waiting.head()) is None or not head.request.is_background):
        return None
    if not running.has_others:
        running.allow_background(inf)
        return None
    if not pace.is_known:
        running.allow_background(0)
        return 0.0
    others = [seq.num_computed_tokens for seq in running.decodes if not seq.request.is_background]
    left_us = _PART * pace.decodes_us(len(others), sum(others))
    _, row_us, token_us, _, _ = pace.step_time.rates
    num_rows = 0
    for seq in running.background:
        seq_us = row_us + token_us * seq.num_computed_tokens
        if seq_us > left_us or (not row_us and num_rows >= _UNKNOWN):
            break
        left_us -= seq_us
        num_rows += 1
    running.allow_background(num_rows)
    return left_us
