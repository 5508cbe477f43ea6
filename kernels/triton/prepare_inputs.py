"""A step's input tensors from the row state, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import next_power_of_two


# The number of rows varies from step to step, and so do the offsets of the three lists in their common upload.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows_ptr", "start_ptr", "num_new_ptr"])
def prepare_inputs_kernel(
    rows_ptr,
    start_ptr,
    num_new_ptr,
    token_ids_ptr,
    page_table_ptr,
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    logits_indices_ptr,
    num_rows,
    stride_ids,
    stride_table,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (N, programs per row): each finds its row's first token by summing the counts of the rows before it."""
    b = tl.program_id(0)
    others = tl.arange(0, BLOCK_ROWS)
    before = tl.load(num_new_ptr + others, mask=(others < b) & (others < num_rows), other=0)
    first = tl.sum(before, 0)
    count = tl.load(num_new_ptr + b)
    start = tl.load(start_ptr + b)
    row = tl.load(rows_ptr + b).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(query_start_loc_ptr + b + 1, first + count)
        tl.store(seq_lens_ptr + b, start + count)
        tl.store(logits_indices_ptr + b, first + count - 1)
        if b == 0:
            tl.store(query_start_loc_ptr, 0)
    step = tl.num_programs(1) * BLOCK
    for done in tl.range(tl.program_id(1) * BLOCK, count, step):
        offs = done + tl.arange(0, BLOCK)
        mask = offs < count
        position = start + offs
        token = tl.load(token_ids_ptr + row * stride_ids + position, mask=mask, other=0)
        page = tl.load(page_table_ptr + row * stride_table + position // PAGE_SIZE, mask=mask, other=0)
        tl.store(input_ids_ptr + first + offs, token, mask=mask)
        tl.store(positions_ptr + first + offs, position.to(tl.int64), mask=mask)
        tl.store(slots_ptr + first + offs, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=mask)


def prepare_inputs_triton(
    rows: Tensor, start: Tensor, num_new: Tensor, num_tokens: int, token_ids: Tensor, page_table: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments as `penstock.kernels.prepare_inputs.prepare_inputs`.

    Returns:
        The fields of its `StepTensors`, in order.
    """
    num_rows = rows.shape[0]
    out = (
        torch.empty(num_tokens, dtype=torch.int32, device=rows.device),
        torch.empty(num_tokens, dtype=torch.int64, device=rows.device),
        torch.empty(num_tokens, dtype=torch.int64, device=rows.device),
        torch.empty(num_rows + 1, dtype=torch.int32, device=rows.device),
        torch.empty(num_rows, dtype=torch.int32, device=rows.device),
        torch.empty(num_rows, dtype=torch.int32, device=rows.device),
    )
    launch_prepare_inputs(rows, start, num_new, num_tokens, token_ids, page_table, page_size, out)
    return out


def launch_prepare_inputs(
    rows: Tensor,
    start: Tensor,
    num_new: Tensor,
    num_tokens: int,
    token_ids: Tensor,
    page_table: Tensor,
    page_size: int,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Like `prepare_inputs_triton`, into existing tensors (a CUDA graph's)."""
    num_rows = rows.shape[0]
    if not num_rows:
        return
    block = 128 if num_tokens <= 4 * num_rows else 1024
    per_row = min(8, -(-num_tokens // block))
    input_ids, positions, slots, query_start_loc, seq_lens, logits_indices = out
    prepare_inputs_kernel[(num_rows, per_row)](
        rows, start, num_new, token_ids, page_table, input_ids, positions, slots, query_start_loc, seq_lens,
        logits_indices, num_rows, token_ids.stride(0), page_table.stride(0),
        PAGE_SIZE=page_size, BLOCK_ROWS=max(256, next_power_of_two(num_rows)), BLOCK=block, num_warps=4,
    )  # fmt: skip
