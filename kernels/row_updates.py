"""Ragged writes into row-indexed state: new rows' tokens, page tables, page appends."""

import torch
from torch import Tensor

_FEW = 8  # runs: one after the other takes less time than an index of all their cells


def write_runs(table: Tensor, rows: Tensor, starts: Tensor, counts: Tensor, values: Tensor) -> None:
    """`table[rows[i], starts[i] : starts[i] + counts[i]] = ` the i-th run of `values`.

    Args:
        table: int32[R, L], written; rows are contiguous.
        rows: int32[C], distinct, or at least with disjoint runs.
        starts: int32[C], first column of each run.
        counts: int32[C], length of each run, may be 0.
        values: int32[sum(counts)], the runs one after the other.
    """
    if not rows.shape == starts.shape == counts.shape:
        raise ValueError(f"rows {tuple(rows.shape)}, starts and counts must have one shape")
    if table.is_cuda:
        from penstock.kernels.triton.row_updates import write_runs_triton

        write_runs_triton(table, rows, starts, counts, values)
        return
    if rows.shape[0] <= _FEW:
        columns, given, used = table.numpy(), values.numpy(), 0
        for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            columns[row, start : start + count] = given[used : used + count]
            used += count
        return
    num_values = values.shape[0]
    # Index of value j in the flat table: its run's first cell, plus j minus the number of values before the run.
    first = rows.long() * table.shape[1] + starts - (counts.cumsum(0) - counts)
    cells = first.repeat_interleave(counts, output_size=num_values).add_(torch.arange(num_values))
    table.view(-1).index_copy_(0, cells, values)


def write_runs_reference(table: Tensor, rows: Tensor, starts: Tensor, counts: Tensor, values: Tensor) -> None:
    """Run by run."""
    used = 0
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
        table[row, start : start + count] = values[used : used + count]
        used += count
