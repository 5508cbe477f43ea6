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
def penalty_kernel(
    logits_ptr,
    counts_ptr,
    rows_ptr,
    positions_ptr,
    token_ids_ptr,
    num_prompt_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    vocab,
    stride_logits,
    stride_ids,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (S, programs per row), over the known tokens of the rows with penalties, in three launches.

    "clear" zeroes their words, and "count" counts them. At "apply" the first of equal tokens takes the word away, and
    applies repetition over prompt and output, presence and frequency over output. The rest of the vocabulary is not
    touched.
    """
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    known = tl.load(positions_ptr + s).to(tl.int32)
    num_prompt = tl.load(num_prompt_ptr + row).to(tl.int32)
    for done in tl.range(tl.program_id(1) * BLOCK, known, tl.num_programs(1) * BLOCK):
        at = done + tl.arange(0, BLOCK)
        is_known = at < known
        ids = tl.load(token_ids_ptr + row * stride_ids + at, mask=is_known, other=0)
        words = counts_ptr + s * vocab + ids
        zero = tl.zeros([BLOCK], dtype=tl.int32)
        if STEP == "clear":
            tl.store(words, zero, mask=is_known)
        elif STEP == "count":
            tl.atomic_or(words, zero + PROMPT_BIT, mask=is_known & (at < num_prompt), sem="relaxed")
            tl.atomic_add(words, zero + 1, mask=is_known & (at >= num_prompt), sem="relaxed")
        else:
            word = tl.atomic_xchg(words, zero, mask=is_known, sem="relaxed")
            is_first = is_known & (word != 0)
            logits = logits_ptr + s * stride_logits + ids
            x = tl.load(logits, mask=is_first, other=0.0)
            x = tl.where(x > 0, tl.math.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            count = (word & (PROMPT_BIT - 1)).to(tl.float32)
            x -= count * frequency + tl.where(count > 0, presence, 0.0)
            tl.store(logits, x, mask=is_first)


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
        counts = torch.empty((num_samples, vocab), dtype=torch.int32, device=logits.device)
        block = 1024
        per_row = min(16, ceil_div(state.token_ids.shape[1], block))
        for step in ("clear", "count", "apply"):
            penalty_kernel[(num_samples, per_row)](
                logits, counts, rows, positions, state.token_ids, state.num_prompt_tokens, state.repetition_penalty,
                state.presence_penalty, state.frequency_penalty, vocab, logits.stride(0), state.token_ids.stride(0),
                STEP=step, BLOCK=block, num_warps=4,
            )  # fmt: skip
