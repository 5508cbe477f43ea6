"""The schedules that cases run through: all pairs of settings by default, their whole product in the long form."""

import os
from itertools import product
from typing import NamedTuple

IS_LONG = bool(os.environ.get("PENSTOCK_SOAK"))


class Schedule(NamedTuple):
    """What decides how texts are cut into steps."""

    budget: int  # tokens of a step: small ones cut prompts into chunks
    page_size: int
    depth: int  # of the pipeline
    cached: bool  # all texts run twice, the second time from the prefix cache
    tight: bool  # a pool so small that sequences are preempted
    together: bool  # all texts in one batch, or one after the other


PAIRWISE = (
    Schedule(8, 1, 0, True, True, True),
    Schedule(24, 16, 1, True, False, True),
    Schedule(4096, 4, 2, False, False, False),
    Schedule(24, 1, 2, False, True, True),
    Schedule(4096, 16, 0, True, True, True),
    Schedule(8, 4, 1, True, True, True),
    Schedule(4096, 1, 1, False, False, True),
    Schedule(8, 16, 2, True, False, False),
    Schedule(24, 4, 0, True, False, False),
    Schedule(24, 1, 1, True, False, False),
    Schedule(4096, 16, 2, False, True, True),
    Schedule(8, 4, 0, False, True, True),
)
"""Any two settings meet."""

ALL = tuple(
    Schedule(*settings)
    for settings in product((8, 24, 4096), (1, 4, 16), (0, 1, 2), (False, True), (False, True), (False, True))
    if settings[-1] or not settings[-2]  # one text alone preempts nobody
)


def schedules(turn: int) -> tuple[Schedule, ...]:
    """All of them in the long form; else two, others at each turn."""
    if IS_LONG:
        return ALL
    start = 2 * turn % len(PAIRWISE)
    return PAIRWISE[start : start + 2]
