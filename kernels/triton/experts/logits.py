"""A router's logits for few tokens: one launch, where a conversion and cuBLAS take three."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import next_power_of_two

MOST_TOKENS = 16
"""The most tokens: each reads the whole matrix, 1 MiB for 128 experts of 2,048 inputs, from the GPU's cache again."""


@triton.jit
def router_logits_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_inputs, num_experts, stride_x, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (E, T): one logit, summed in fp32."""
    expert, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for done in tl.range(0, num_inputs, BLOCK):
        k = done + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * stride_x + k, mask=k < num_inputs, other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + expert * num_inputs + k, mask=k < num_inputs, other=0.0)
    logit = tl.sum(total, 0)
    if HAS_BIAS:
        logit += tl.load(bias_ptr + expert)
    tl.store(out_ptr + token * num_experts + expert, logit)


def router_logits_triton(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Arguments and result as `penstock.kernels.experts.routing.router_logits`, for up to `MOST_TOKENS` tokens."""
    (num_tokens, num_inputs), num_experts = x.shape, weight.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=x.device)
    if num_tokens:
        router_logits_kernel[(num_experts, num_tokens)](
            x, weight, weight if bias is None else bias, out, num_inputs, num_experts, x.stride(0),
            HAS_BIAS=bias is not None, BLOCK=min(2048, next_power_of_two(num_inputs)), num_warps=4,
        )  # fmt: skip
    return out
