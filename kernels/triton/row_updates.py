"""Ragged writes into row-indexed int32 state, all runs in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import next_power_of_two


# The number of runs varies from step to step, and so do the offsets of the lists in their common upload.
@triton.jit(
    do_not_specialize=["num_runs"],
    do_not_specialize_on_alignment=["rows_ptr", "starts_ptr", "counts_ptr", "values_ptr"],
)
def write_runs_kernel(
    table_ptr,
    rows_ptr,
    starts_ptr,
    counts_ptr,
    values_ptr,
    num_runs,
    stride_row,
    BLOCK_RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (C, programs per run): a run's values begin after those of all runs before it."""
    run = tl.program_id(0)
    runs = tl.arange(0, BLOCK_RUNS)
    before = tl.load(counts_ptr + runs, mask=(runs < run) & (runs < num_runs), other=0)
    first = tl.sum(before, 0)
    count = tl.load(counts_ptr + run)
    base = table_ptr + tl.load(rows_ptr + run).to(tl.int64) * stride_row + tl.load(starts_ptr + run)
    step = tl.num_programs(1) * BLOCK
    for done in tl.range(tl.program_id(1) * BLOCK, count, step):
        cols = done + tl.arange(0, BLOCK)
        mask = cols < count
        tl.store(base + cols, tl.load(values_ptr + first + cols, mask=mask, other=0), mask=mask)


def write_runs_triton(table: Tensor, rows: Tensor, starts: Tensor, counts: Tensor, values: Tensor) -> None:
    """Arguments as `penstock.gpu_worker.devices.device.Device.write_runs`, all on the device."""
    num_runs, num_values = rows.shape[0], values.shape[0]
    if not num_runs or not num_values:
        return
    block = 1024
    # Run lengths are on the device. 8 programs per run stride over it, so the launch need not know the longest run.
    per_run = min(8, -(-num_values // block))
    write_runs_kernel[(num_runs, per_run)](
        table, rows, starts, counts, values, num_runs, table.stride(0),
        BLOCK_RUNS=max(256, next_power_of_two(num_runs)), BLOCK=block, num_warps=4,
    )  # fmt: skip
