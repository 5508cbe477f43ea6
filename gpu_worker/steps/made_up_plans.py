"""Plans of made-up rows, for steps before the first request."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.ipc.messages import NewRow, SamplingParams, StepPlan

SOME_TOKENS, MANY_TOKENS = 40, 80
"""Launches use other blocks above 16 tokens, and again above 64. Products of experts change blocks at two numbers of
tokens, the second four times the first. So among steps of `MANY_TOKENS`, four times as many and so on, one lies between
the two."""

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class Limits(NamedTuple):
    """Bounds of the plans."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    vocab_size: int


class MadeUpRow(NamedTuple):
    """A sequence whose last `num_new` of `length` tokens are computed."""

    length: int
    num_new: int = 1
    samples: bool = True
    sampling: SamplingParams = GREEDY


def made_up_plan(limits: Limits, rows: Sequence[MadeUpRow]) -> StepPlan:
    """A plan of new rows. All their tokens are 0, and all their pages are the first page."""
    new_rows = tuple(
        NewRow(
            row=i,
            token_ids=bytes(4 * row.length),
            num_prompt_tokens=row.length,
            sampling=row.sampling,
            page_ids=bytes(4 * -(-row.length // limits.page_size)),
        )
        for i, row in enumerate(rows)
    )
    num_new = np.array([row.num_new for row in rows], dtype=np.int32)
    start = np.array([row.length for row in rows], dtype=np.int32) - num_new
    return StepPlan(
        step_id=0,
        rows=np.arange(len(rows), dtype=np.int32).tobytes(),
        start=start.tobytes(),
        num_new=num_new.tobytes(),
        samples=bytes(row.samples for row in rows),
        new_rows=new_rows,
    )
