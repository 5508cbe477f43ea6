"""The rows of a ragged batch, for tensors that hold a state for each row."""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """A row with several new tokens: tokens [begin, end) of the batch."""

    row: int  # index into the states
    begin: int
    end: int


class StateRows:
    """N rows with T new tokens, made once per step and used by all layers.

    A row appears at most once. Its state is as its last token left it; the state of a new row is zero.
    """

    def __init__(self, rows: Tensor, query_start_loc: Tensor, max_query_len: int) -> None:
        """Plan nothing yet. On a GPU nothing is planned at all, so that this can be part of a captured graph.

        Args:
            rows: int32[N], the rows of the states.
            query_start_loc: int32[N + 1].
            max_query_len: largest number of new tokens of a row (an upper bound is fine).
        """
        if query_start_loc.shape[0] != rows.shape[0] + 1:
            raise ValueError(f"query_start_loc {tuple(query_start_loc.shape)} does not fit {rows.shape[0]} rows")
        self.rows = rows
        self.query_start_loc = query_start_loc
        self.max_query_len = max_query_len

    @cached_property
    def all_runs(self) -> list[Run]:
        """All rows that have new tokens."""
        starts = self.query_start_loc.tolist()
        runs = [Run(row, starts[i], starts[i + 1]) for i, row in enumerate(self.rows.tolist())]
        return [run for run in runs if run.end > run.begin]

    @cached_property
    def runs(self) -> list[Run]:
        """The rows with more than one new token."""
        return [run for run in self.all_runs if run.end - run.begin > 1]

    @cached_property
    def singles(self) -> tuple[Tensor, Tensor] | None:
        """The rows with one new token: (int64[S] rows, int64[S] tokens of the batch); None if there are none."""
        found = [(run.row, run.begin) for run in self.all_runs if run.end - run.begin == 1]
        if not found:
            return None
        rows, tokens = torch.tensor(found).unbind(1)
        return rows, tokens
