"""The Gumbel-max draw (greedy rows included) over [S, V] logits, and the launches that lead up to it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling_state import SamplingNeeds, SamplingState
from penstock.kernels.triton.device import ceil_div, next_power_of_two
from penstock.kernels.triton.philox import token_noise
from penstock.kernels.triton.sampling_adjust import adjust_logits
from penstock.kernels.triton.sampling_filter import filter_bounds, tempered


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
    """Grid (ceil(V / BLOCK), S): the best score of a block of ids, and the lowest id that has it."""
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
            z = tl.where((z > below) & (z >= floor), z, float("-inf"))
        # Blocks that the filters emptied need no noise.
        if (temperature > 0.0) & (tl.max(z, 0) > float("-inf")):
            position = tl.load(positions_ptr + s)
            z += token_noise(tl.load(seed_ptr + row), position, first // 4, BLOCK)
    top = tl.max(z, 0)
    # Ids past V read -inf; NaN logits match nothing: both must still give an id of the vocabulary.
    top_id = tl.minimum(tl.min(tl.where(z == top, ids, vocab - 1), 0), vocab - 1)
    tl.store(best_ptr + s * tl.num_programs(0) + block, top)
    tl.store(best_id_ptr + s * tl.num_programs(0) + block, top_id)


@triton.jit
def pick_kernel(best_ptr, best_id_ptr, out_ptr, num_blocks, BLOCK: tl.constexpr):
    """Grid (S,): the best of a row's blocks; equal scores go to the lowest id."""
    s = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    score = tl.load(best_ptr + s * num_blocks + at, mask=at < num_blocks, other=float("-inf"))
    ids = tl.load(best_id_ptr + s * num_blocks + at, mask=at < num_blocks, other=2147483647)
    last = tl.load(best_id_ptr + s * num_blocks + num_blocks - 1)
    tl.store(out_ptr + s, tl.minimum(tl.min(tl.where(score == tl.max(score, 0), ids, 2147483647), 0), last))


def sample_triton(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, needs: SamplingNeeds
) -> Tensor:
    """Arguments as `penstock.kernels.sampling.sample`; int32 [S], no host synchronisation.

    Rows of `logits` must be contiguous. Other dtypes than fp32 are read as they are unless something edits them.
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
    pick_kernel[(num_samples,)](best, best_id, out, num_blocks, BLOCK=next_power_of_two(num_blocks), num_warps=1)
    return out
