"""The gated delta rule where each number of a key decays by itself, token by token.

Each program computes a block of values of a value head of a row, with their state in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.scan.rows import StateRows
from penstock.kernels.triton.device import ceil_div, next_power_of_two
from penstock.kernels.triton.scan.mamba2 import softplus


@triton.jit
def gated_delta_by_key_kernel(
    q_ptr, k_ptr, v_ptr, dt_ptr, b_ptr, a_ptr, dt_bias_ptr, state_ptr, out_ptr, rows_ptr, start_ptr,
    stride_q, stride_k, stride_v, stride_dt, stride_b, stride_row, num_heads, heads_of_key, key_dim, value_dim,
    scale, eps, max_beta,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Grid (N, H, blocks of values)."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    if end == first:
        return
    i, j = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_i, in_j = i < key_dim, j < value_dim
    in_state = in_i[:, None] & in_j[None, :]
    states = state_ptr + tl.load(rows_ptr + row).to(tl.int64) * stride_row + head * key_dim * value_dim
    states += i[:, None] * value_dim + j[None, :]
    state = tl.load(states, mask=in_state, other=0.0)
    at_key, at_decay = head // heads_of_key * key_dim + i, head * key_dim + i
    a = tl.load(a_ptr + head)
    bias = tl.load(dt_bias_ptr + at_decay, mask=in_i, other=0.0).to(tl.float32)
    for t in range(end - first):
        token = (first + t).to(tl.int64)
        q = tl.load(q_ptr + token * stride_q + at_key, mask=in_i, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * stride_k + at_key, mask=in_i, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * stride_v + head * value_dim + j, mask=in_j, other=0.0).to(tl.float32)
        q *= scale / tl.sqrt(tl.sum(q * q, 0) + eps)
        k *= 1.0 / tl.sqrt(tl.sum(k * k, 0) + eps)
        dt = tl.load(dt_ptr + token * stride_dt + at_decay, mask=in_i, other=0.0).to(tl.float32)
        beta = max_beta * tl.sigmoid(tl.load(b_ptr + token * stride_b + head).to(tl.float32))
        state *= tl.exp(a * softplus(dt + bias))[:, None]
        delta = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * delta[None, :]
        out = tl.sum(state * q[:, None], 0)
        tl.store(out_ptr + (token * num_heads + head) * value_dim + j, out.to(out_ptr.dtype.element_ty), mask=in_j)
    tl.store(states, state, mask=in_state)


def scan_decays_by_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    b: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: StateRows,
    eps: float,
    max_beta: float,
) -> Tensor:
    """Arguments and result as in `gated_delta_scan_triton`, with `dt` of [T, H, K]."""
    num_heads, value_dim = v.shape[1:]
    num_key_heads, key_dim = k.shape[1:]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not v.shape[0]:
        return out
    values = min(16, next_power_of_two(value_dim))
    gated_delta_by_key_kernel[(rows.rows.shape[0], num_heads, ceil_div(value_dim, values))](
        *(q, k, v, dt, b, a, dt_bias, state, out, rows.rows, rows.query_start_loc),
        *(q.stride(0), k.stride(0), v.stride(0), dt.stride(0), b.stride(0), state.stride(0)),
        *(num_heads, num_heads // num_key_heads, key_dim, value_dim, key_dim**-0.5, eps, max_beta),
        KEYS=next_power_of_two(key_dim),
        VALUES=values,
        num_warps=4,
    )
    return out
