"""Log-probabilities of the best n tokens and of the sampled one, without writing a log-softmax."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import next_power_of_two
from penstock.kernels.triton.sampling.groups import (
    READ_AGAIN,
    group_size,
    groups_near_top,
    load_groups,
    scan,
    tokens_of,
    top_and_total,
)
from penstock.kernels.triton.sampling.search import LARGEST, LOG2_E

NO_ID: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def next_best(line, vocab, last, last_id, BLOCK: tl.constexpr):
    """(logit, id) of a row's best token after `last`, in the order of falling logits and rising ids."""
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_id = tl.full([BLOCK], NO_ID, dtype=tl.int32)
    for first in tl.range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < vocab, other=0.0).to(tl.float32)
        is_left = (ids < vocab) & ((x < last) | ((x == last) & (ids > last_id)))
        is_better = is_left & ((x > best) | (best_id == NO_ID))
        best = tl.where(is_better, x, best)
        best_id = tl.where(is_better, ids, best_id)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, best_id, NO_ID), 0)


@triton.jit(do_not_specialize_on_alignment=["chosen_ptr"])  # a slice, where prompts are scored piece by piece
def top_logprobs_kernel(
    logits_ptr,
    chosen_ptr,
    maxima_ptr,
    tops_ptr,
    sums_ptr,
    few_ptr,
    out_ptr,
    out_id_ptr,
    chosen_out_ptr,
    vocab,
    num_groups,
    num_blocks,
    stride_logits,
    NUM_TOP: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_FIRST: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (S,): the best tokens are among the few groups with the largest maxima, unless too many tie."""
    s = tl.program_id(0).to(tl.int64)
    line = logits_ptr + s * stride_logits
    top, total = top_and_total(tops_ptr + s * num_blocks, sums_ptr + s * num_blocks, num_blocks, LOG2_E, BLOCK_BLOCKS)
    normaliser = top + tl.log(total)
    chosen = tl.load(line + tl.load(chosen_ptr + s)).to(tl.float32)
    tl.store(chosen_out_ptr + s, chosen - normaliser)
    if NUM_TOP > 0:
        bar, groups, mask = groups_near_top(
            maxima_ptr + s * num_groups, few_ptr + s * FEW, num_groups, top, -LARGEST, FEW, BLOCK_GROUPS
        )
        x = load_groups(line, groups, mask, vocab, GROUP)
        x = tl.where(x >= bar, x, float("-inf"))
        ids = tokens_of(groups, GROUP)
        num_near = tl.sum(tl.where(x > float("-inf"), 1, 0), 0)
        best = tl.full([], float("inf"), dtype=tl.float32)
        best_id = tl.full([], -1, dtype=tl.int32)
        if (num_near >= NUM_TOP) | (bar == -LARGEST):
            # If all finite logits are there, minus infinity comes next; enough of that is among the first tokens.
            first = tl.arange(0, BLOCK_FIRST)
            is_empty = tl.load(line + first, mask=first < vocab, other=0.0).to(tl.float32) == float("-inf")
            for i in tl.range(0, NUM_TOP):
                best = tl.max(x, 0)
                if best > float("-inf"):
                    taken = tl.min(tl.where(x == best, ids, NO_ID), 0)
                    x = tl.where(ids == taken, float("-inf"), x)
                else:
                    taken = tl.min(tl.where(is_empty, first, NO_ID), 0)
                    is_empty = is_empty & (first != taken)
                tl.store(out_ptr + s * NUM_TOP + i, best - normaliser)
                tl.store(out_id_ptr + s * NUM_TOP + i, taken)
        else:
            for i in tl.range(0, NUM_TOP):
                best, best_id = next_best(line, vocab, best, best_id, BLOCK)
                tl.store(out_ptr + s * NUM_TOP + i, best - normaliser)
                tl.store(out_id_ptr + s * NUM_TOP + i, best_id)


def top_logprobs_triton(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results as `penstock.kernels.sampling.top_logprobs.top_logprobs`."""
    num_samples, vocab = logits.shape
    device = logits.device
    top = torch.empty((num_samples, num_top), dtype=torch.float32, device=device)
    top_ids = torch.empty((num_samples, num_top), dtype=torch.int32, device=device)
    of_chosen = torch.empty(num_samples, dtype=torch.float32, device=device)
    if not num_samples:
        return top, top_ids, of_chosen
    scanned = scan(logits)
    num_groups, num_blocks = scanned.maxima.shape[1], scanned.tops.shape[1]
    # `groups_near_top` mostly finds more than seven eighths of these.
    group = group_size(vocab)
    few_groups = min(READ_AGAIN // group, next_power_of_two(num_top + num_top // 7 + 1), next_power_of_two(num_groups))
    few = torch.empty((num_samples, few_groups), dtype=torch.int32, device=device)
    top_logprobs_kernel[(num_samples,)](
        logits, chosen, *scanned, few, top, top_ids, of_chosen, vocab, num_groups, num_blocks, logits.stride(0),
        NUM_TOP=num_top, GROUP=group, FEW=few_groups, BLOCK_FIRST=next_power_of_two(max(1, 2 * num_top)),
        BLOCK_GROUPS=next_power_of_two(num_groups), BLOCK_BLOCKS=next_power_of_two(num_blocks), BLOCK=2048,
        num_warps=8,
    )  # fmt: skip
    return top, top_ids, of_chosen
