"""The Gumbel-max draw (greedy rows included) over [S, V] logits, and the launches before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling.sampling_state import SamplingNeeds, SamplingState
from penstock.kernels.triton.device import ceil_div, next_power_of_two
from penstock.kernels.triton.sampling.adjust import adjust_logits
from penstock.kernels.triton.sampling.filter import filter_bounds, tempered
from penstock.kernels.triton.sampling.philox import token_noise


@triton.jit
def larger_or_nan(a, b):
    """The maximum, or NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def draw_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    temperature_ptr,
    seed_ptr,
    bounds_ptr,
    best_ptr,
    best_id_ptr,
    vocab,
    stride_logits,
    RANDOM: tl.constexpr,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (ceil(V / BLOCK), S): the best score of a block of ids, and the lowest id with that score.

    The best score of a block with a NaN is NaN, because filters must not drop it.
    """
    block = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    first = block * BLOCK
    ids = first + tl.arange(0, BLOCK)
    line = logits_ptr + s * stride_logits
    temperature = 0.0
    row = tl.load(rows_ptr + s).to(tl.int64)
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
    z = tempered(line, first, vocab, tl.where(temperature > 0.0, temperature, 1.0), BLOCK)
    if RANDOM:
        if FILTER:
            below = tl.load(bounds_ptr + 2 * s)
            floor = tl.load(bounds_ptr + 2 * s + 1)
            z = tl.where((z <= below) | (z < floor), float("-inf"), z)
        # Blocks that the filters have emptied need no noise.
        if (temperature > 0.0) & (tl.max(z, 0) > float("-inf")):  # with NaN, either result will do
            position = tl.load(positions_ptr + s)
            z += token_noise(tl.load(seed_ptr + row), position, first // 4, BLOCK)
    top = tl.reduce(z, 0, larger_or_nan)
    top_id = tl.min(tl.where(z == top, ids, vocab), 0)
    tl.store(best_ptr + s * tl.num_programs(0) + block, top)
    tl.store(best_id_ptr + s * tl.num_programs(0) + block, top_id)


@triton.jit
def pick_kernel(
    best_ptr, best_id_ptr, rows_ptr, positions_ptr, token_ids_ptr, out_ptr, num_blocks, stride_ids, BLOCK: tl.constexpr
):
    """Grid (S,): the best of a row's blocks; among equal scores, the lowest id.

    A best score of NaN or plus infinity gives -1, and minus infinity gives -2. Then the table gets token 0.
    """
    s = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    score = tl.load(best_ptr + s * num_blocks + at, mask=at < num_blocks, other=float("-inf"))
    ids = tl.load(best_id_ptr + s * num_blocks + at, mask=at < num_blocks, other=2147483647)
    top = tl.reduce(score, 0, larger_or_nan)
    drawn = tl.min(tl.where(score == top, ids, 2147483647), 0)
    is_finite = (top > float("-inf")) & (top < float("inf"))
    drawn = tl.where(is_finite, drawn, tl.where(top == float("-inf"), -2, -1))
    tl.store(out_ptr + s, drawn)
    row = tl.load(rows_ptr + s).to(tl.int64)
    position = tl.load(positions_ptr + s).to(tl.int64)
    tl.store(token_ids_ptr + row * stride_ids + position, tl.maximum(drawn, 0))


def sample_triton(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, needs: SamplingNeeds
) -> Tensor:
    """Arguments as `penstock.kernels.sampling.sampling.sample`; returns int32 [S], without host synchronisation.

    Rows of `logits` must be contiguous. Dtypes other than fp32 are read directly unless some row's logits are edited.
    """
    num_samples, vocab = logits.shape
    if logits.stride(1) != 1 or state.temperature.stride(0) != 1 or state.seed.stride(0) != 1:
        raise ValueError(f"logits {logits.stride()} or a parameter {state.temperature.stride()} is not contiguous")
    out = torch.empty(num_samples, dtype=torch.int32, device=logits.device)
    if not num_samples:
        return out
    if needs.bias or needs.min_tokens or needs.penalties:
        logits = logits.float()
        adjust_logits(logits, rows, positions, state, needs)
    filtered = needs.random and (needs.min_p or needs.top_k or needs.top_p)
    bounds = filter_bounds(logits, rows, state, needs) if filtered else state.temperature
    block = min(4096, max(16, next_power_of_two(vocab)))
    num_blocks = ceil_div(vocab, block)
    best = torch.empty((num_samples, num_blocks), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((num_samples, num_blocks), dtype=torch.int32, device=logits.device)
    draw_kernel[(num_blocks, num_samples)](
        logits, rows, positions, state.temperature, state.seed, bounds, best, best_id, vocab, logits.stride(0),
        RANDOM=needs.random, FILTER=filtered, BLOCK=block, num_warps=8,
    )  # fmt: skip
    pick_kernel[(num_samples,)](
        best, best_id, rows, positions, state.token_ids, out, num_blocks, state.token_ids.stride(0),
        BLOCK=next_power_of_two(num_blocks), num_warps=1,
    )  # fmt: skip
    return out
