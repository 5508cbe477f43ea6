"""A step's input tensors, built on the device that holds the row state."""

from typing import NamedTuple

import torch
from torch import Tensor


class StepTensors(NamedTuple):
    """What the forward pass of one ragged batch reads (T tokens, N rows)."""

    input_ids: Tensor  # int32[T]
    positions: Tensor  # int64[T]
    slot_mapping: Tensor  # int64[T]
    query_start_loc: Tensor  # int32[N + 1]: row b's tokens are [query_start_loc[b], query_start_loc[b + 1])
    seq_lens: Tensor  # int32[N]: context length including this step's tokens
    logits_indices: Tensor  # int32[N]: index of each row's last token


def prepare_inputs(
    rows: Tensor, start: Tensor, num_new: Tensor, num_tokens: int, token_ids: Tensor, page_table: Tensor, page_size: int
) -> StepTensors:
    """Gather the ids, positions and slots of a step's tokens from the row state.

    Args:
        rows: int32[N], row of each batch row.
        start: int32[N], first position that it computes.
        num_new: int32[N], how many it computes; 0 for padding at the end.
        num_tokens: T = sum(num_new), known on the host.
        token_ids: int32[R, L], known and sampled ids by position.
        page_table: int32[R, max_pages].
        page_size: tokens per page.
    """
    if not rows.shape == start.shape == num_new.shape:
        raise ValueError(f"rows {tuple(rows.shape)}, start and num_new must have one shape")
    if rows.is_cuda:
        from penstock.kernels.triton.prepare_inputs import prepare_inputs_triton

        made = prepare_inputs_triton(rows, start, num_new, num_tokens, token_ids, page_table, page_size)
        return StepTensors(*made)
    query_start_loc = torch.zeros(rows.shape[0] + 1, dtype=torch.int32)
    torch.cumsum(num_new, 0, dtype=torch.int32, out=query_start_loc[1:])
    row_of_token, positions = rows.long(), start.long()
    if num_tokens != rows.shape[0]:
        row_of_token = row_of_token.repeat_interleave(num_new, output_size=num_tokens)
        first = (start - query_start_loc[:-1]).long().repeat_interleave(num_new, output_size=num_tokens)
        positions = first.add_(torch.arange(num_tokens))
    flat = row_of_token * token_ids.shape[1]
    input_ids = token_ids.view(-1).index_select(0, flat.add_(positions))
    flat = row_of_token * page_table.shape[1]
    pages = page_table.view(-1).index_select(0, flat.add_(positions.div(page_size, rounding_mode="floor")))
    slot_mapping = pages.long().mul_(page_size).add_(positions.remainder(page_size))
    return StepTensors(input_ids, positions, slot_mapping, query_start_loc, start + num_new, query_start_loc[1:] - 1)


def prepare_inputs_reference(
    rows: Tensor, start: Tensor, num_new: Tensor, num_tokens: int, token_ids: Tensor, page_table: Tensor, page_size: int
) -> StepTensors:
    """Token by token."""
    input_ids, positions, slots, ends, lens = [], [], [], [0], []
    for row, first, count in zip(rows.tolist(), start.tolist(), num_new.tolist(), strict=True):
        for position in range(first, first + count):
            input_ids.append(int(token_ids[row, position]))
            positions.append(position)
            slots.append(int(page_table[row, position // page_size]) * page_size + position % page_size)
        ends.append(ends[-1] + count)
        lens.append(first + count)
    assert ends[-1] == num_tokens
    device = rows.device
    return StepTensors(
        torch.tensor(input_ids, dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
        torch.tensor(ends, dtype=torch.int32, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        torch.tensor(ends[1:], dtype=torch.int32, device=device) - 1,
    )
