"""What writing runs of values into a table means."""

from torch import Tensor


def write_runs_reference(table: Tensor, rows: Tensor, starts: Tensor, counts: Tensor, values: Tensor) -> None:
    """Run by run; arguments as `penstock.kernels.triton.row_updates.write_runs_triton`."""
    used = 0
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
        table[row, start : start + count] = values[used : used + count]
        used += count
