"""Searches for the value down to which enough tokens, or tokens of enough weight, are found.

fp32 numbers are ordered as their keys, int32, so halving an interval of keys ends at a single number.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
"""Of the fp32 numbers."""


@triton.jit
def key_of(x):
    """int32, in the order of the fp32 numbers x."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """The fp32 number with a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def middle_of(lo, hi):
    """(lo + hi) / 2, rounded down, where the sum could overflow."""
    return (lo & hi) + ((lo ^ hi) >> 1)


@triton.jit
def sum_least_most(sum_a, least_a, most_a, sum_b, least_b, most_b):
    """Three reductions for the latency of one."""
    return sum_a + sum_b, tl.minimum(least_a, least_b), tl.maximum(most_a, most_b)


@triton.jit
def largest_reaching(x, weights, goal, lo, hi):
    """The largest value v, with a key in [lo, hi), such that the weights of all x >= v reach `goal`.

    They must reach it from `lo` on, and not from `hi` on. Tokens that do not count are minus infinity.
    """
    while lo + 1 < hi:
        key = middle_of(lo, hi)
        is_above = x >= value_of(key)
        above = tl.where(is_above, x, float("inf"))
        below = tl.where(is_above, float("-inf"), x)
        reached, least, most = tl.reduce((tl.where(is_above, weights, 0), above, below), 0, sum_least_most)
        # No token lies between the pivot and its neighbours. (-0.0 has a key of its own, so the pivot is a limit.)
        is_reached = reached >= goal
        lo = tl.where(is_reached, tl.maximum(key, key_of(least)), lo)
        hi = tl.where(is_reached, hi, tl.minimum(key, key_of(most) + 1))
    return value_of(lo)


@triton.jit
def load_block(line, first, vocab, BLOCK: tl.constexpr):
    """fp32 [BLOCK] logits; minus infinity past the end."""
    ids = first + tl.arange(0, BLOCK)
    return tl.load(line + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def weight_from(line, vocab, top, scale, least, BLOCK: tl.constexpr):
    """The sum of 2 ** ((x - top) * scale) over a row's logits x >= least."""
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for first in tl.range(0, vocab, BLOCK):
        x = load_block(line, first, vocab, BLOCK)
        sums += tl.where(x >= least, tl.exp2((x - top) * scale), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def search_row(line, vocab, top, scale, goal, lo, hi, BLOCK: tl.constexpr):
    """`largest_reaching` over a whole row, with the weights 2 ** ((x - top) * scale); each pass leaves a quarter."""
    while lo + 1 < hi:
        key_b = middle_of(lo, hi)
        key_a = middle_of(lo, key_b)
        key_c = middle_of(key_b, hi)
        a = value_of(key_a)
        b = value_of(key_b)
        c = value_of(key_c)
        sums_a = tl.zeros([BLOCK], dtype=tl.float32)
        sums_b = tl.zeros([BLOCK], dtype=tl.float32)
        sums_c = tl.zeros([BLOCK], dtype=tl.float32)
        for first in tl.range(0, vocab, BLOCK):
            x = load_block(line, first, vocab, BLOCK)
            weights = tl.exp2((x - top) * scale)
            sums_a += tl.where(x >= a, weights, 0.0)
            sums_b += tl.where(x >= b, weights, 0.0)
            sums_c += tl.where(x >= c, weights, 0.0)
        if tl.sum(sums_c, 0) >= goal:
            lo = key_c
        elif tl.sum(sums_b, 0) >= goal:
            lo = key_b
            hi = key_c
        elif tl.sum(sums_a, 0) >= goal:
            lo = key_a
            hi = key_b
        else:
            hi = key_a
    return value_of(lo)


@triton.jit
def least_logit(quotient, temperature):
    """The least x with x / temperature >= quotient, where the division rounds by IEEE rules: near their product."""
    x = value_of(key_of(quotient * temperature) + (tl.arange(0, 16) - 8))
    wide = tl.zeros_like(x)
    return tl.min(tl.where(tl.math.div_rn(x, wide + temperature) >= wide + quotient, x, float("inf")), 0)


@triton.jit
def with_ties(x, temperature):
    """The least logit whose quotient is that of x; x itself among subnormal numbers, where that may be far away."""
    return tl.minimum(x, least_logit(tl.math.div_rn(x, temperature), temperature))
