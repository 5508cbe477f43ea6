"""Work that nobody waits for (`Request.is_background`), beside requests that somebody does wait for.

It is behind all others in the queue (`BACKGROUND`), yields its rows and pages to them first, and computes beside
them only as much as makes a step a little longer: tokens of streams come as if it were not there. With nobody else in a
row it computes like any other request. There is no bound on its waiting; its owner has one (a batch's window).
"""

from math import inf

from penstock.core.scheduling.rows.running import RunningSet
from penstock.core.steps.prefill_pace import PrefillPace

_PART = 0.1
"""By how much a step of others may become longer."""

_UNKNOWN = 8
"""Rows beside others where a row has been found to cost nothing."""


def make_room(running: RunningSet, pace: PrefillPace) -> float | None:
    """Set how many rows in the background may decode in the next step; return the microseconds left for their prompts.

    None: there is nobody else in a row, so nothing holds them back.
    """
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
