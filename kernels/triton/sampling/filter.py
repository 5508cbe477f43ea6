"""min-p, top-k and top-p as one threshold per row, found without sorting and exact however the logits are distributed.

1. `scan_kernel` reads the logits: the maximum of each group of tokens, and the weight of each block, which is the
   sum of exp(logit / temperature).
2. `near_top_kernel` reads the few groups with the largest maxima. They hold all tokens above some value, and mostly
   those are enough to find the threshold. If not, it guesses from a sample of the row between which two values the
   threshold lies.
3. For the rows without a threshold, `weigh_kernel` reads the logits again: how many tokens (top-k), or which weight
   (top-p), is above each of the two values. It gathers the tokens between them.
4. `settle_kernel` finds the threshold among those. If the guess was wrong or too many tokens tie, it reads the row as
   often as bisection needs.

Everything is compared as raw logits, because division by a temperature keeps their order. Tokens that tie only after
the division are kept together, since the last step takes the least logit with the same quotient.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling.sampling_state import SamplingNeeds, SamplingState
from penstock.kernels.triton.device import ceil_div, next_power_of_two
from penstock.kernels.triton.sampling.groups import (
    READ_AGAIN,
    block_size,
    filters_of,
    group_size,
    groups_near_top,
    load_groups,
    scan,
    top_and_total,
)
from penstock.kernels.triton.sampling.search import (
    LARGEST,
    LOG2_E,
    key_of,
    largest_reaching,
    least_logit,
    search_row,
    value_of,
    weight_from,
    with_ties,
)

MOST_CANDIDATES = 8192
"""How many tokens `settle_kernel` can take between the two values."""

COUNT: tl.constexpr = tl.constexpr(1)
WEIGHT: tl.constexpr = tl.constexpr(2)


@triton.jit
def near_top_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    maxima_ptr,
    tops_ptr,
    sums_ptr,
    few_ptr,
    lowest_ptr,
    measure_ptr,
    between_ptr,
    num_candidates_ptr,
    vocab,
    num_groups,
    num_blocks,
    most_candidates,
    stride_logits,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):
    """Grid (S,): lowest[s], or measure[s] (COUNT or WEIGHT) and between[s] = (least, from, below, top) for the rest."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    has_any, temperature, min_p, top_k, top_p = filters_of(row, vocab, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr)
    has_k = (top_k > 0) & TOP_K
    has_p = (top_p < 1.0) & TOP_P
    line = logits_ptr + s * stride_logits
    lowest = tl.full([], float("-inf"), dtype=tl.float32)
    measure = tl.full([], 0, dtype=tl.int32)
    if has_any:
        scale = LOG2_E / temperature
        top, total = top_and_total(
            tops_ptr + s * num_blocks, sums_ptr + s * num_blocks, num_blocks, scale, BLOCK_BLOCKS
        )
        is_sound = total < float("inf")  # not with NaN, infinity, or nothing left
        if (min_p > 0.0) & is_sound:
            lowest = least_logit(tl.math.div_rn(top, temperature) + tl.log(min_p), temperature)
        if (has_k | has_p) & is_sound:
            least = tl.maximum(lowest, -LARGEST)
            k = top_k.to(tl.float32)
            # Where weights are zero in fp32, more tokens are of no use.
            useful = top - 150.0 * temperature
            bar, groups, mask = groups_near_top(
                maxima_ptr + s * num_groups, few_ptr + s * FEW, num_groups, top, useful, FEW, BLOCK_GROUPS
            )
            x = load_groups(line, groups, mask, vocab, GROUP)
            if tl.abs(bar) < LARGEST:
                # Above a gap between quotients: what ties after the division is all there.
                bar = least_logit(value_of(key_of(tl.math.div_rn(bar, temperature)) + 1), temperature)
            has_all = least >= bar
            reached = tl.maximum(least, bar)
            x = tl.where(x >= reached, x, float("-inf"))
            if has_k:
                ones = tl.where(x > float("-inf"), 1.0, 0.0)
                if tl.sum(ones, 0) >= k:
                    lowest = with_ties(largest_reaching(x, ones, k, key_of(reached), key_of(top) + 1), temperature)
                    x = tl.where(x >= lowest, x, float("-inf"))
                    reached = lowest
                    has_all = True
                elif not has_all:
                    measure = COUNT
            if has_p & (measure == 0):
                weights = tl.exp2((x - top) * scale)
                found = tl.sum(weights, 0)
                goal = tl.maximum(top_p * tl.where(has_all, found, total), 1e-30)  # top_p 0 keeps the best token
                if (found >= goal) & (has_all | (lowest == float("-inf"))):
                    lowest = largest_reaching(x, weights, goal, key_of(reached), key_of(top) + 1)
                else:
                    measure = WEIGHT
            if measure != 0:
                few = tl.arange(0, FEW)
                x = load_groups(line, (few.to(tl.int64) * num_groups // FEW).to(tl.int32), few < FEW, vocab, GROUP)
                x = tl.where(x >= least, x, float("-inf"))
                is_weight = (measure == WEIGHT).to(tl.float32)  # 0 makes the weight of each token 1
                weights = tl.where(x > float("-inf"), tl.exp2((x - top) * (scale * is_weight)), 0.0)
                in_sample = tl.sum(weights, 0)
                share = FEW / (1.0 * num_groups)  # of the row's tokens
                # What is below the threshold of top-p are many light tokens, so the sample tells it best.
                goal = tl.where(lowest == float("-inf"), in_sample - (1.0 - top_p) * total * share, top_p * in_sample)
                goal = tl.where(measure == COUNT, k * share, goal)
                lo = key_of(least)
                hi = key_of(top) + 1
                guess = largest_reaching(x, weights, tl.maximum(goal, 1e-30), lo, hi)
                margin = 0.4 * most_candidates * share * tl.exp2((guess - top) * (scale * is_weight))
                start = least
                if goal + margin <= in_sample:
                    start = largest_reaching(x, weights, goal + margin, lo, hi)
                below = tl.full([], float("inf"), dtype=tl.float32)
                if goal > margin:
                    below = value_of(key_of(largest_reaching(x, weights, goal - margin, lo, hi)) + 1)
                tl.store(between_ptr + 4 * s, least)
                tl.store(between_ptr + 4 * s + 1, start)
                tl.store(between_ptr + 4 * s + 2, below)
                tl.store(between_ptr + 4 * s + 3, top)
                tl.store(num_candidates_ptr + s, 0)
            elif lowest > float("-inf"):
                lowest = with_ties(lowest, temperature)
    tl.store(measure_ptr + s, measure)
    tl.store(lowest_ptr + s, lowest)


@triton.jit
def weigh_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    measure_ptr,
    between_ptr,
    reached_ptr,
    num_candidates_ptr,
    candidates_ptr,
    vocab,
    num_blocks,
    most_candidates,
    stride_logits,
    BLOCK: tl.constexpr,
):
    """Grid (programs per row, S): for each block, what is at or above least, from and below; the logits between.

    The order of the candidates differs from run to run; their sums are those of integers, so it does not matter.
    """
    s = tl.program_id(1).to(tl.int64)
    measure = tl.load(measure_ptr + s)
    if measure == 0:
        return
    temperature = tl.load(temperature_ptr + tl.load(rows_ptr + s).to(tl.int64))
    scale = LOG2_E / temperature * (measure == WEIGHT).to(tl.float32)
    least = tl.load(between_ptr + 4 * s)
    start = tl.load(between_ptr + 4 * s + 1)
    below = tl.load(between_ptr + 4 * s + 2)
    top = tl.load(between_ptr + 4 * s + 3)
    for block in tl.range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + s * stride_logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        weights = tl.where(x >= least, tl.exp2((x - top) * scale), 0.0)
        reached = reached_ptr + 3 * (s * num_blocks + block)
        tl.store(reached, tl.sum(weights, 0))
        tl.store(reached + 1, tl.sum(tl.where(x >= start, weights, 0.0), 0))
        tl.store(reached + 2, tl.sum(tl.where(x >= below, weights, 0.0), 0))
        is_between = (x >= start) & (x < below)
        counter = num_candidates_ptr + s + tl.zeros([BLOCK], dtype=tl.int32)
        slot = tl.atomic_add(counter, tl.full([BLOCK], 1, dtype=tl.int32), mask=is_between, sem="relaxed")
        tl.store(candidates_ptr + s * most_candidates + slot, x, mask=is_between & (slot < most_candidates))


@triton.jit
def settle_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    measure_ptr,
    between_ptr,
    reached_ptr,
    num_candidates_ptr,
    candidates_ptr,
    lowest_ptr,
    vocab,
    num_blocks,
    stride_logits,
    TOP_P: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):
    """Grid (S,): lowest[s] of the rows with a measure."""
    s = tl.program_id(0).to(tl.int64)
    measure = tl.load(measure_ptr + s)
    if measure == 0:
        return
    row = tl.load(rows_ptr + s).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    line = logits_ptr + s * stride_logits
    least = tl.load(between_ptr + 4 * s)
    start = tl.load(between_ptr + 4 * s + 1)
    below = tl.load(between_ptr + 4 * s + 2)
    top = tl.load(between_ptr + 4 * s + 3)
    blocks = tl.arange(0, BLOCK_BLOCKS)
    reached = reached_ptr + 3 * (s * num_blocks + blocks)
    of_least = tl.sum(tl.load(reached, mask=blocks < num_blocks, other=0.0), 0)
    of_start = tl.sum(tl.load(reached + 1, mask=blocks < num_blocks, other=0.0), 0)
    of_below = tl.sum(tl.load(reached + 2, mask=blocks < num_blocks, other=0.0), 0)
    scale = LOG2_E / temperature * (measure == WEIGHT).to(tl.float32)
    goal = tl.where(measure == WEIGHT, tl.maximum(top_p * of_least, 1e-30), top_k.to(tl.float32))
    num = tl.load(num_candidates_ptr + s)
    lowest = tl.full([], float("-inf"), dtype=tl.float32)
    if of_least >= goal:  # else there are fewer than k
        lo = key_of(start)
        hi = key_of(below)
        if of_start < goal:
            hi = lo
            lo = key_of(least)
        if of_below >= goal:
            lo = hi
            hi = key_of(top) + 1
        if (num <= MOST) & (of_start >= goal) & (of_below < goal):
            at = tl.arange(0, MOST)
            x = tl.load(candidates_ptr + s * MOST + at, mask=at < num, other=float("-inf"))
            weights = tl.where(x > float("-inf"), tl.exp2((x - top) * scale), 0.0)
            # In units of 2**-40, so that sums do not depend on the order.
            fixed = (weights * 1099511627776.0).to(tl.int64)
            rest = tl.maximum(((goal - of_below) * 1099511627776.0).to(tl.int64), 1)
            lowest = largest_reaching(x, fixed, rest, lo, hi)
        else:
            lowest = search_row(line, vocab, top, scale, goal, lo, hi, BLOCK)
        lowest = with_ties(lowest, temperature)
        least = lowest
    if (measure == COUNT) & (top_p < 1.0) & TOP_P:
        scale = LOG2_E / temperature
        lo = key_of(least)
        hi = key_of(top) + 1
        goal = tl.maximum(top_p * weight_from(line, vocab, top, scale, least, BLOCK), 1e-30)
        lowest = with_ties(search_row(line, vocab, top, scale, goal, lo, hi, BLOCK), temperature)
    if lowest > float("-inf"):
        tl.store(lowest_ptr + s, lowest)


class Kept(NamedTuple):
    """What may be drawn of each row, in logits before the temperature."""

    lowest: Tensor  # fp32 [S], the least that may be drawn; all above it may be, too
    tops: Tensor  # fp32 [S, blocks], the largest of each block; undefined for rows without filters


def find_kept(logits: Tensor, rows: Tensor, state: SamplingState, needs: SamplingNeeds) -> Kept:
    """The filters' thresholds; arguments as in `sampling.sample`, after the edits of logits."""
    num_samples, vocab = logits.shape
    device = logits.device

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    block, group = block_size(vocab), group_size(vocab)
    num_groups, num_blocks = ceil_div(vocab, group), ceil_div(vocab, block)
    scanned = scan(logits, rows, state)
    few_groups = min(READ_AGAIN // group, next_power_of_two(num_groups))
    few = scratch(num_samples, few_groups, dtype=torch.int32)
    lowest, measure = scratch(num_samples), scratch(num_samples, dtype=torch.int32)
    between, num_candidates = scratch(num_samples, 4), scratch(num_samples, dtype=torch.int32)
    # Three variants are compiled instead of seven, because a filter that no row needs is skipped on the device.
    top_k = needs.top_k or needs.top_p
    near_top_kernel[(num_samples,)](
        logits, rows, state.temperature, state.min_p, state.top_k, state.top_p, *scanned, few, lowest,
        measure, between, num_candidates, vocab, num_groups, num_blocks, MOST_CANDIDATES, logits.stride(0),
        TOP_K=top_k, TOP_P=needs.top_p, GROUP=group, FEW=few_groups, BLOCK_GROUPS=next_power_of_two(num_groups),
        BLOCK_BLOCKS=next_power_of_two(num_blocks), num_warps=8,
    )  # fmt: skip
    if not top_k or num_groups <= few_groups:
        return Kept(lowest, scanned.tops)
    reached, candidates = scratch(num_samples, num_blocks, 3), scratch(num_samples, MOST_CANDIDATES)
    weigh_kernel[(min(num_blocks, max(4, ceil_div(1024, num_samples))), num_samples)](
        logits, rows, state.temperature, measure, between, reached, num_candidates, candidates, vocab, num_blocks,
        MOST_CANDIDATES, logits.stride(0), BLOCK=block, num_warps=8,
    )  # fmt: skip
    settle_kernel[(num_samples,)](
        logits, rows, state.temperature, state.top_k, state.top_p, measure, between, reached, num_candidates,
        candidates, lowest, vocab, num_blocks, logits.stride(0),
        TOP_P=needs.top_p, MOST=MOST_CANDIDATES, BLOCK=4096, BLOCK_BLOCKS=next_power_of_two(num_blocks), num_warps=16,
    )  # fmt: skip
    return Kept(lowest, scanned.tops)
