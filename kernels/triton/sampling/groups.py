"""What one pass over the logits leaves of each row, so that later kernels need to read only a few groups of tokens.

That is the maximum of each group of neighbouring tokens, and the maximum and the weight of each block of groups.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling.sampling_state import SamplingState
from penstock.kernels.triton.device import ceil_div, next_power_of_two
from penstock.kernels.triton.sampling.search import LARGEST, LOG2_E

READ_AGAIN = 4096
"""How many tokens of a row are read again at most: those of the groups with the largest maxima, or a sample."""


class Scan(NamedTuple):
    """All fp32; undefined for rows without filters, if those were asked for."""

    maxima: Tensor  # [S, groups]
    tops: Tensor  # [S, blocks], the largest of each block
    sums: Tensor  # [S, blocks], of exp((x - the block's largest) / temperature)


def block_size(vocab: int) -> int:
    """How many tokens of a row one program reads at a time."""
    return min(2048, max(32, next_power_of_two(vocab)))


def group_size(vocab: int) -> int:
    """How many tokens have one maximum. One program reads all maxima of a row, so there are at most 8192 of them."""
    return max(32, next_power_of_two(ceil_div(vocab, 8192)))


@triton.jit
def filters_of(row, vocab, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr):
    """(has any, temperature, min_p, top_k, top_p) of a row; 0, 0 and 1 are off, and greedy rows have none."""
    temperature = tl.load(temperature_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where(top_k < vocab, top_k, 0)
    top_p = tl.load(top_p_ptr + row)
    has_any = (temperature > 0.0) & ((min_p > 0.0) | (top_k > 0) | (top_p < 1.0))
    return has_any, temperature, min_p, top_k, top_p


@triton.jit
def scan_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    maxima_ptr,
    tops_ptr,
    sums_ptr,
    vocab,
    num_groups,
    stride_logits,
    FILTER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (ceil(V / BLOCK), S)."""
    block = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    temperature = 1.0
    if FILTER:
        row = tl.load(rows_ptr + s).to(tl.int64)
        has_any, temperature, _, _, _ = filters_of(row, vocab, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr)
        if not has_any:
            return
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + s * stride_logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    maxima = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(maxima_ptr + s * num_groups + group, maxima, mask=group < num_groups)
    top = tl.max(maxima, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    slot = s * tl.num_programs(0) + block
    tl.store(tops_ptr + slot, top)
    tl.store(sums_ptr + slot, tl.sum(tl.exp2((x - safe) * (LOG2_E / temperature)), 0))


def scan(logits: Tensor, rows: Tensor | None = None, state: SamplingState | None = None) -> Scan:
    """Of logits [S, V]; with a state, only of the rows that have filters, and at their temperature."""
    num_samples, vocab = logits.shape
    block, group = block_size(vocab), group_size(vocab)
    num_groups, num_blocks = ceil_div(vocab, group), ceil_div(vocab, block)
    out = Scan(
        *(
            torch.empty((num_samples, size), dtype=torch.float32, device=logits.device)
            for size in (num_groups, num_blocks, num_blocks)
        )
    )
    filters = (state.temperature, state.min_p, state.top_k, state.top_p) if state is not None else (None,) * 4
    scan_kernel[(num_blocks, num_samples)](
        logits, rows, *filters, *out, vocab, num_groups, logits.stride(0),
        FILTER=state is not None, GROUP=group, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def top_and_total(tops_ptr, sums_ptr, num_blocks, scale, BLOCK: tl.constexpr):
    """A row's largest logit, and the sum of 2 ** ((x - it) * scale): no number below infinity if it is not finite."""
    blocks = tl.arange(0, BLOCK)
    tops = tl.load(tops_ptr + blocks, mask=blocks < num_blocks, other=float("-inf"))
    sums = tl.load(sums_ptr + blocks, mask=blocks < num_blocks, other=0.0)
    top = tl.max(tops, 0)
    return top, tl.sum(sums * tl.exp2((tops - top) * scale), 0)


@triton.jit
def bar_of_few(maxima, top, lowest, FEW: tl.constexpr):
    """A value which at most FEW of the maxima reach, and mostly nearly as many do; infinity if there is none.

    If there are only so many finite ones, it is the lowest fp32 number; else it is at least `lowest`.
    """
    num = tl.sum(tl.where(maxima > float("-inf"), 1, 0), 0)
    bar = tl.full([], -LARGEST, dtype=tl.float32)
    if num > FEW:
        bar = top
        num = tl.sum(tl.where(maxima >= bar, 1, 0), 0)
        if num > FEW:
            bar = float("inf")
        low = tl.maximum(lowest, tl.min(tl.where(maxima > float("-inf"), maxima, top), 0))
        going = num < FEW - FEW // 8
        if tl.sum(tl.where(maxima >= low, 1, 0), 0) <= FEW:
            bar = low
            going = False
        while going:
            middle = 0.5 * low + 0.5 * bar
            going = (middle > low) & (middle < bar)
            num = tl.sum(tl.where(maxima >= middle, 1, 0), 0)
            if num > FEW:
                low = middle
            else:
                bar = middle
                going = going & (num < FEW - FEW // 8)
    return bar


@triton.jit
def groups_near_top(maxima_ptr, few_ptr, num_groups, top, lowest, FEW: tl.constexpr, BLOCK: tl.constexpr):
    """(bar, groups [FEW], mask): the groups of a row in which all its logits >= bar are; `few_ptr` is scratch [FEW]."""
    PART: tl.constexpr = BLOCK if BLOCK < 2048 else 2048
    all_groups = tl.arange(0, BLOCK)
    bar = bar_of_few(
        tl.load(maxima_ptr + all_groups, mask=all_groups < num_groups, other=float("-inf")), top, lowest, FEW
    )
    num = tl.full([], 0, dtype=tl.int32)
    for first in tl.range(0, num_groups, PART):
        groups = first + tl.arange(0, PART)
        is_near = tl.load(maxima_ptr + groups, mask=groups < num_groups, other=float("-inf")) >= bar
        at = num + tl.cumsum(tl.where(is_near, 1, 0), 0) - 1
        tl.store(few_ptr + tl.minimum(at, FEW - 1), groups, mask=is_near)  # more of them may be infinite
        num += tl.sum(tl.where(is_near, 1, 0), 0)
    tl.debug_barrier()
    few = tl.arange(0, FEW)
    return bar, tl.load(few_ptr + few, mask=few < num, other=0), few < num


@triton.jit
def tokens_of(groups, GROUP: tl.constexpr):
    """int32 [groups * GROUP]: their tokens."""
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.reshape(ids, [groups.shape[0] * GROUP])


@triton.jit
def load_groups(line, groups, mask, vocab, GROUP: tl.constexpr):
    """fp32 [groups * GROUP]: their logits; minus infinity where there are none."""
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(line + ids, mask=mask[:, None] & (ids < vocab), other=float("-inf")).to(tl.float32)
    return tl.reshape(x, [groups.shape[0] * GROUP])
