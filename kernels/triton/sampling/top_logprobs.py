"""Log-probabilities of the best n tokens and of the sampled one, without writing a log-softmax."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import ceil_div, next_power_of_two


@triton.jit
def block_best_kernel(
    logits_ptr, sum_ptr, best_ptr, best_id_ptr, vocab, stride_logits, NUM_TOP: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (ceil(V / BLOCK), S): a block's maximum, its sum of exp(z - max), and its NUM_TOP best tokens."""
    block = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits_ptr + s * stride_logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(z, 0)
    slot = s * tl.num_programs(0) + block
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(sum_ptr + 2 * slot, top)
    tl.store(sum_ptr + 2 * slot + 1, tl.sum(tl.exp(z - safe), 0))
    for i in tl.range(0, NUM_TOP):
        best = tl.max(z, 0)
        best_id = tl.min(tl.where(z == best, ids, 2147483647), 0)
        tl.store(best_ptr + slot * NUM_TOP + i, best)
        tl.store(best_id_ptr + slot * NUM_TOP + i, best_id)
        z = tl.where(ids == best_id, float("-inf"), z)


@triton.jit(do_not_specialize_on_alignment=["chosen_ptr"])  # a slice, where prompts are scored piece by piece
def merge_best_kernel(
    logits_ptr,
    chosen_ptr,
    sum_ptr,
    best_ptr,
    best_id_ptr,
    out_ptr,
    out_id_ptr,
    chosen_out_ptr,
    num_blocks,
    stride_logits,
    NUM_TOP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (S,): merge the blocks' sums and candidates."""
    s = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCK_B)
    tops = tl.load(sum_ptr + 2 * (s * num_blocks + b), mask=b < num_blocks, other=float("-inf"))
    sums = tl.load(sum_ptr + 2 * (s * num_blocks + b) + 1, mask=b < num_blocks, other=0.0)
    top = tl.max(tops, 0)
    normaliser = top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))
    chosen = tl.load(logits_ptr + s * stride_logits + tl.load(chosen_ptr + s)).to(tl.float32)
    tl.store(chosen_out_ptr + s, chosen - normaliser)
    if NUM_TOP > 0:
        c = tl.arange(0, BLOCK_C)
        num_candidates = num_blocks * NUM_TOP
        base = s * num_candidates
        z = tl.load(best_ptr + base + c, mask=c < num_candidates, other=float("-inf"))
        ids = tl.load(best_id_ptr + base + c, mask=c < num_candidates, other=2147483647)
        for i in tl.range(0, NUM_TOP):
            best = tl.max(z, 0)
            best_id = tl.min(tl.where(z == best, ids, 2147483647), 0)
            tl.store(out_ptr + s * NUM_TOP + i, best - normaliser)
            tl.store(out_id_ptr + s * NUM_TOP + i, best_id)
            taken = ids == best_id
            z = tl.where(taken, float("-inf"), z)
            ids = tl.where(taken, 2147483647, ids)


def top_logprobs_triton(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results as `penstock.kernels.sampling.top_logprobs.top_logprobs`."""
    num_samples, vocab = logits.shape
    device = logits.device
    top = torch.empty((num_samples, num_top), dtype=torch.float32, device=device)
    top_ids = torch.empty((num_samples, num_top), dtype=torch.int32, device=device)
    of_chosen = torch.empty(num_samples, dtype=torch.float32, device=device)
    if not num_samples:
        return top, top_ids, of_chosen
    block = min(4096, max(16, next_power_of_two(vocab)))
    num_blocks = ceil_div(vocab, block)
    sums = torch.empty((num_samples, num_blocks, 2), dtype=torch.float32, device=device)
    best = torch.empty((num_samples, num_blocks, max(1, num_top)), dtype=torch.float32, device=device)
    best_ids = torch.empty(best.shape, dtype=torch.int32, device=device)
    block_best_kernel[(num_blocks, num_samples)](
        logits, sums, best, best_ids, vocab, logits.stride(0), NUM_TOP=num_top, BLOCK=block, num_warps=8
    )
    merge_best_kernel[(num_samples,)](
        logits, chosen, sums, best, best_ids, top, top_ids, of_chosen, num_blocks, logits.stride(0),
        NUM_TOP=num_top, BLOCK_B=next_power_of_two(num_blocks), BLOCK_C=next_power_of_two(num_blocks * max(1, num_top)),
        num_warps=4,
    )  # fmt: skip
    return top, top_ids, of_chosen
