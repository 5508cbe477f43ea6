"""Edits to logits before sampling: logit bias, the stop-id mask of min_tokens, penalties."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling.sampling_state import SamplingNeeds, SamplingState
from penstock.kernels.triton.device import ceil_div, next_power_of_two

# A token's word in the count table: how often the token occurs in the output, and this bit if it is in the prompt.
PROMPT_BIT: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit
def bias_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    stop_ids_ptr,
    min_tokens_ptr,
    num_prompt_ptr,
    num_bias,
    num_stop,
    stride_logits,
    stride_bias,
    stride_values,
    stride_stop,
    BLOCK_BIAS: tl.constexpr,
    BLOCK_STOP: tl.constexpr,
):
    """Grid (S,): the sparse edits of one row, in place. One kernel makes both kinds, so one variant is compiled."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    line = logits_ptr + s * stride_logits
    k = tl.arange(0, BLOCK_BIAS)
    ids = tl.load(bias_ids_ptr + row * stride_bias + k, mask=k < num_bias, other=-1)
    values = tl.load(bias_values_ptr + row * stride_values + k, mask=k < num_bias, other=0.0)
    old = tl.load(line + ids, mask=ids >= 0, other=0.0)
    tl.store(line + ids, old + values, mask=ids >= 0)
    # A stop id may have a bias, so the mask must be applied after it.
    tl.debug_barrier()
    num_output = tl.load(positions_ptr + s).to(tl.int64) - tl.load(num_prompt_ptr + row)
    if num_output < tl.load(min_tokens_ptr + row):
        j = tl.arange(0, BLOCK_STOP)
        stops = tl.load(stop_ids_ptr + row * stride_stop + j, mask=j < num_stop, other=-1)
        tl.store(line + stops, tl.full([BLOCK_STOP], float("-inf"), dtype=tl.float32), mask=stops >= 0)


@triton.jit
def penalised(row, repetition_ptr, presence_ptr, frequency_ptr):
    """(any, repetition, presence, frequency) of a row."""
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    return (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0), repetition, presence, frequency


@triton.jit
def clear_kernel(counts_ptr, rows_ptr, repetition_ptr, presence_ptr, frequency_ptr, vocab, BLOCK: tl.constexpr):
    """Grid (S, ceil(V / BLOCK)): no token of the rows with penalties is counted yet."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    wanted, _, _, _ = penalised(row, repetition_ptr, presence_ptr, frequency_ptr)
    if not wanted:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts_ptr + s * vocab + ids, tl.zeros([BLOCK], dtype=tl.int32), mask=ids < vocab)


@triton.jit
def count_kernel(
    counts_ptr,
    rows_ptr,
    positions_ptr,
    token_ids_ptr,
    num_prompt_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    vocab,
    stride_ids,
    BLOCK: tl.constexpr,
):
    """Grid (S, programs per row): count each known token of the rows with penalties."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    wanted, _, _, _ = penalised(row, repetition_ptr, presence_ptr, frequency_ptr)
    if not wanted:
        return
    known = tl.load(positions_ptr + s).to(tl.int32)
    num_prompt = tl.load(num_prompt_ptr + row).to(tl.int32)
    line = counts_ptr + s * vocab
    step = tl.num_programs(1) * BLOCK
    for done in tl.range(tl.program_id(1) * BLOCK, known, step):
        at = done + tl.arange(0, BLOCK)
        ids = tl.load(token_ids_ptr + row * stride_ids + at, mask=at < known, other=0)
        prompt = (at < known) & (at < num_prompt)
        output = (at < known) & (at >= num_prompt)
        tl.atomic_or(line + ids, tl.full([BLOCK], PROMPT_BIT, dtype=tl.int32), mask=prompt, sem="relaxed")
        tl.atomic_add(line + ids, tl.full([BLOCK], 1, dtype=tl.int32), mask=output, sem="relaxed")


@triton.jit
def penalty_kernel(
    logits_ptr,
    counts_ptr,
    rows_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    vocab,
    stride_logits,
    BLOCK: tl.constexpr,
):
    """Grid (S, ceil(V / BLOCK)): repetition over prompt and output, presence and frequency over output."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    wanted, repetition, presence, frequency = penalised(row, repetition_ptr, presence_ptr, frequency_ptr)
    if not wanted:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab
    x = tl.load(logits_ptr + s * stride_logits + ids, mask=mask, other=0.0)
    word = tl.load(counts_ptr + s * vocab + ids, mask=mask, other=0)
    repeated = tl.where(x > 0, tl.math.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    x = tl.where(word != 0, repeated, x)
    count = (word & (PROMPT_BIT - 1)).to(tl.float32)
    x -= count * frequency + tl.where(count > 0, presence, 0.0)
    tl.store(logits_ptr + s * stride_logits + ids, x, mask=mask)


def adjust_logits(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, needs: SamplingNeeds) -> None:
    """Apply the edits in `needs` to fp32 `logits` [S, V], in place; other arguments as in `sampling.sample`."""
    num_samples, vocab = logits.shape
    if needs.bias or needs.min_tokens:
        num_bias, num_stop = state.bias_ids.shape[1], state.stop_ids.shape[1]
        bias_kernel[(num_samples,)](
            logits, rows, positions, state.bias_ids, state.bias_values, state.stop_ids, state.min_tokens,
            state.num_prompt_tokens, num_bias, num_stop, logits.stride(0), state.bias_ids.stride(0),
            state.bias_values.stride(0), state.stop_ids.stride(0),
            BLOCK_BIAS=next_power_of_two(num_bias), BLOCK_STOP=next_power_of_two(num_stop), num_warps=4,
        )  # fmt: skip
    if needs.penalties:
        # Only the rows with penalties, usually a few, are cleared and read.
        counts = torch.empty((num_samples, vocab), dtype=torch.int32, device=logits.device)
        penalties = (state.repetition_penalty, state.presence_penalty, state.frequency_penalty)
        block = 1024
        clear_kernel[(num_samples, ceil_div(vocab, block))](counts, rows, *penalties, vocab, BLOCK=block, num_warps=4)
        per_row = min(16, ceil_div(state.token_ids.shape[1], block))
        count_kernel[(num_samples, per_row)](
            counts, rows, positions, state.token_ids, state.num_prompt_tokens, *penalties, vocab,
            state.token_ids.stride(0), BLOCK=block, num_warps=4,
        )  # fmt: skip
        penalty_kernel[(num_samples, ceil_div(vocab, block))](
            logits, counts, rows, *penalties, vocab, logits.stride(0), BLOCK=block, num_warps=4
        )
