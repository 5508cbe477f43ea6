"""The Gumbel-max draw (greedy rows included) over [S, V] logits, and the launches before it.

The largest logit / temperature + noise belongs to the token with the smallest exponential variate times
exp(-logit / temperature). That product is computed roughly for all tokens, and exactly for those that can win.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling.sampling_state import SamplingNeeds, SamplingState
from penstock.kernels.triton.device import ceil_div, next_power_of_two
from penstock.kernels.triton.sampling.adjust import adjust_logits
from penstock.kernels.triton.sampling.filter import Kept, find_kept
from penstock.kernels.triton.sampling.groups import block_size
from penstock.kernels.triton.sampling.philox import gumbel, rough_exponential, token_words, word_of
from penstock.kernels.triton.sampling.search import LOG2_E


@triton.jit
def larger_or_nan(a, b):
    """The maximum, or NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def score(x, words, temperature):
    """fp32: logits / temperature, rounded by IEEE rules as on the CPU path, + noise."""
    return tl.math.div_rn(x, tl.zeros_like(x) + temperature) + gumbel(words)


@triton.jit
def draw_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    temperature_ptr,
    seed_ptr,
    lowest_ptr,
    scanned_ptr,
    top_ptr,
    best_id_ptr,
    vocab,
    stride_logits,
    RANDOM: tl.constexpr,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (ceil(V / BLOCK), S): the largest logit of a block of ids, and the id that wins in the block.

    Of equal scores, the lowest id wins. The largest logit is NaN if any is, because filters must not drop it.
    """
    block = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    first = block * BLOCK
    ids = first + tl.arange(0, BLOCK)
    slot = s * tl.num_programs(0) + block
    if FILTER:
        lowest = tl.load(lowest_ptr + s)
        # For a row without filters, that may be any number; none is below minus infinity.
        if tl.load(scanned_ptr + slot) < lowest:
            tl.store(top_ptr + slot, float("-inf"))
            return
    line = logits_ptr + s * stride_logits
    x = tl.load(line + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    if FILTER:
        x = tl.where(x < lowest, float("-inf"), x)
    top = tl.reduce(x, 0, larger_or_nan)
    temperature = 0.0
    row = tl.load(rows_ptr + s).to(tl.int64)
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
    scale = LOG2_E / tl.where(temperature > 0.0, temperature, 1.0)
    # Beside a quotient that overflows, noise makes no difference.
    if (temperature > 0.0) & (tl.abs(top * scale) < float("inf")):
        seed = tl.load(seed_ptr + row)
        position = tl.load(positions_ptr + s)
        words = token_words(seed, position, first // 4, BLOCK)
        rough = rough_exponential(words) * tl.exp2(top * scale - x * scale)
        # Twice the error of the polynomial, and that of rounding logits / temperature.
        limit = tl.min(rough, 0) * (1.001 + 1e-6 * tl.abs(top * scale))
        # The sum of one is its place in the block. That of more has a higher bit.
        sum_of_near = tl.sum(tl.where(rough <= limit, BLOCK + tl.arange(0, BLOCK), 0), 0)
        best_id = first + sum_of_near - BLOCK
        if sum_of_near >= 2 * BLOCK:
            best = tl.full([], float("-inf"), dtype=tl.float32)
            near_id = tl.min(tl.where(rough <= limit, ids, vocab), 0)
            best_id = near_id
            while near_id < vocab:
                near_x = tl.load(line + near_id).to(tl.float32)
                near_score = score(near_x, word_of(seed, position, near_id), temperature)
                best_id = tl.where(near_score > best, near_id, best_id)
                best = tl.maximum(best, near_score)
                near_id = tl.min(tl.where((rough <= limit) & (ids > near_id), ids, vocab), 0)
    else:
        best_id = tl.min(tl.where(x == top, ids, vocab), 0)
    tl.store(top_ptr + slot, top)
    tl.store(best_id_ptr + slot, best_id)


@triton.jit
def pick_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    temperature_ptr,
    seed_ptr,
    top_ptr,
    best_id_ptr,
    token_ids_ptr,
    out_ptr,
    num_blocks,
    stride_logits,
    stride_ids,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (S,): the best of the winners of a row's blocks; of equal scores, the lowest id.

    NaN among the logits, or a best score of plus infinity, gives -1, and one of minus infinity -2. Then the table gets
    token 0.
    """
    s = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    tops = tl.load(top_ptr + s * num_blocks + at, mask=at < num_blocks, other=float("-inf"))
    ids = tl.load(best_id_ptr + s * num_blocks + at, mask=at < num_blocks, other=2147483647)
    row = tl.load(rows_ptr + s).to(tl.int64)
    position = tl.load(positions_ptr + s).to(tl.int64)
    top = tl.reduce(tops, 0, larger_or_nan)
    scores = tops
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            has_any = tops > float("-inf")
            x = tl.load(logits_ptr + s * stride_logits + ids, mask=has_any, other=float("-inf")).to(tl.float32)
            scores = score(x, word_of(tl.load(seed_ptr + row), position, ids), temperature)
    best = tl.max(scores, 0)
    drawn = tl.min(tl.where(scores == best, ids, 2147483647), 0)
    drawn = tl.where(best == float("-inf"), -2, drawn)
    drawn = tl.where((best == float("inf")) | (top != top), -1, drawn)
    tl.store(out_ptr + s, drawn)
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
    kept = find_kept(logits, rows, state, needs) if filtered else Kept(state.temperature, state.temperature)
    block = block_size(vocab)
    num_blocks = ceil_div(vocab, block)
    tops = torch.empty((num_samples, num_blocks), dtype=torch.float32, device=logits.device)
    best_ids = torch.empty((num_samples, num_blocks), dtype=torch.int32, device=logits.device)
    draw_kernel[(num_blocks, num_samples)](
        logits, rows, positions, state.temperature, state.seed, kept.lowest, kept.tops, tops, best_ids, vocab,
        logits.stride(0),
        RANDOM=needs.random, FILTER=filtered, BLOCK=block, num_warps=4,
    )  # fmt: skip
    pick_kernel[(num_samples,)](
        logits, rows, positions, state.temperature, state.seed, tops, best_ids, state.token_ids, out, num_blocks,
        logits.stride(0), state.token_ids.stride(0), RANDOM=needs.random, BLOCK=next_power_of_two(num_blocks),
        num_warps=1,
    )  # fmt: skip
    return out
