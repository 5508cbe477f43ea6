"""min-p, top-k and top-p as one threshold per row, found without sorting.

Each pass over the row counts (top-k) or weighs (top-p) the tokens above three pivots between the bounds, and keeps the
quarter with the answer. It ends when one token, or no fp32 number, is left between the bounds. So the threshold is
exact, however the values are distributed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling.sampling_state import SamplingNeeds, SamplingState
from penstock.kernels.triton.device import next_power_of_two


@triton.jit
def tempered(line, first, vocab, temperature, BLOCK: tl.constexpr):
    """fp32 [BLOCK] logits / temperature, rounded by IEEE rules so that the CPU path sees the same values."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(line + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    return tl.math.div_rn(x, tl.zeros_like(x) + temperature)


@triton.jit
def mass_above(line, vocab, temperature, top, floor, a, b, c, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Of tokens z >= floor: how many are > a, > b, > c (with MASS, the sum of exp(z - top) over them); and counts."""
    zero = tl.zeros([BLOCK], dtype=tl.float32)
    sum_a = zero
    sum_b = zero
    sum_c = zero
    num_a = zero
    num_b = zero
    num_c = zero
    for first in tl.range(0, vocab, BLOCK):
        z = tempered(line, first, vocab, temperature, BLOCK)
        z = tl.where(z >= floor, z, float("-inf"))
        num_a += tl.where(z > a, 1.0, 0.0)
        num_b += tl.where(z > b, 1.0, 0.0)
        num_c += tl.where(z > c, 1.0, 0.0)
        if MASS:
            w = tl.exp(z - top)
            sum_a += tl.where(z > a, w, 0.0)
            sum_b += tl.where(z > b, w, 0.0)
            sum_c += tl.where(z > c, w, 0.0)
    count_a = tl.sum(num_a, 0)
    count_b = tl.sum(num_b, 0)
    count_c = tl.sum(num_c, 0)
    if MASS:
        return tl.sum(sum_a, 0), tl.sum(sum_b, 0), tl.sum(sum_c, 0), count_a, count_b, count_c
    return count_a, count_b, count_c, count_a, count_b, count_c


@triton.jit
def search(line, vocab, temperature, top, floor, lo, hi, num_lo, goal, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest `lo` such that the tokens above it reach `goal`: tokens > lo are kept.

    On entry the tokens > lo reach the goal (there are num_lo) and the tokens > hi do not.
    """
    num_hi = 0.0
    going = num_lo - num_hi > 1.0
    while going:
        width = hi - lo
        a = lo + 0.25 * width
        b = lo + 0.5 * width
        c = lo + 0.75 * width
        sum_a, sum_b, sum_c, num_a, num_b, num_c = mass_above(
            line, vocab, temperature, top, floor, a, b, c, MASS, BLOCK
        )
        old_lo = lo
        old_hi = hi
        if sum_c >= goal:
            lo = c
            num_lo = num_c
        elif sum_b >= goal:
            lo = b
            num_lo = num_b
            hi = c
            num_hi = num_c
        elif sum_a >= goal:
            lo = a
            num_lo = num_a
            hi = b
            num_hi = num_b
        else:
            hi = a
            num_hi = num_a
        going = (num_lo - num_hi > 1.0) & ((lo != old_lo) | (hi != old_hi))
        if not MASS:
            going = going & (num_lo != goal)
    return lo


@triton.jit
def threshold_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    bounds_ptr,
    vocab,
    stride_logits,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (S,): bounds[s] = (below, floor); tokens with tempered logit > below and >= floor may be drawn."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    has_k = (top_k > 0) & (top_k < vocab) & TOP_K
    has_p = (top_p < 1.0) & TOP_P
    has_min = (min_p > 0.0) & MIN_P
    line = logits_ptr + s * stride_logits
    below = tl.full([], float("-inf"), dtype=tl.float32)
    floor = tl.full([], float("-inf"), dtype=tl.float32)
    if (temperature > 0.0) & (has_k | has_p | has_min):
        highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        lowest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        for first in tl.range(0, vocab, BLOCK):
            z = tempered(line, first, vocab, temperature, BLOCK)
            highest = tl.maximum(highest, z)
            lowest = tl.minimum(lowest, tl.where(z > float("-inf"), z, float("inf")))
        top = tl.max(highest, 0)
        bottom = tl.min(lowest, 0)
        if has_min:
            floor = top + tl.log(min_p)
            bottom = tl.maximum(bottom, floor)
        if has_k | has_p:
            # Just under the lowest remaining value, so that all of them are above it.
            lo = bottom - tl.maximum(tl.abs(bottom) * 1e-6, 1e-30)
            total, _, _, num_left, _, _ = mass_above(line, vocab, temperature, top, floor, lo, lo, lo, TOP_P, BLOCK)
            if has_k & (num_left > top_k.to(tl.float32)):
                k = top_k.to(tl.float32)
                below = search(line, vocab, temperature, top, floor, lo, top, num_left, k, False, BLOCK)
                lo = below
                if has_p:
                    total, _, _, num_left, _, _ = mass_above(
                        line, vocab, temperature, top, floor, lo, lo, lo, TOP_P, BLOCK
                    )
            if has_p:
                goal = tl.maximum(top_p * total, 1e-30)  # top_p 0 keeps the best token
                below = search(line, vocab, temperature, top, floor, lo, top, num_left, goal, True, BLOCK)
    tl.store(bounds_ptr + 2 * s, below)
    tl.store(bounds_ptr + 2 * s + 1, floor)


def filter_bounds(logits: Tensor, rows: Tensor, state: SamplingState, needs: SamplingNeeds) -> Tensor:
    """fp32 [S, 2], (below, floor): a token may be drawn if its tempered logit is > below and >= floor."""
    num_samples, vocab = logits.shape
    bounds = torch.empty((num_samples, 2), dtype=torch.float32, device=logits.device)
    block = min(4096, next_power_of_two(vocab))
    # Three variants are compiled instead of seven, because a filter that no row needs is skipped on the device.
    top_k = needs.top_k or needs.top_p
    threshold_kernel[(num_samples,)](
        logits, rows, state.temperature, state.min_p, state.top_k, state.top_p, bounds, vocab, logits.stride(0),
        MIN_P=True, TOP_K=top_k, TOP_P=needs.top_p, BLOCK=block, num_warps=16,
    )  # fmt: skip
    return bounds
