"""The scan of Mamba, token by token: each program has a block of channels of a row, with their states in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.scan.rows import StateRows
from penstock.kernels.triton.device import ceil_div, next_power_of_two
from penstock.kernels.triton.scan.mamba2 import softplus


@triton.jit
def mamba1_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, dt_bias_ptr, state_ptr, out_ptr, rows_ptr, start_ptr,
    stride_x, stride_dt, stride_b, stride_c, stride_row, num_channels, state_size,
    KEYS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid (N, blocks of channels)."""
    row = tl.program_id(0)
    first, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    if end == first:
        return
    n, i = tl.arange(0, KEYS), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_n, in_i = n < state_size, i < num_channels
    in_state = in_n[:, None] & in_i[None, :]
    at = n[:, None] * num_channels + i[None, :]
    states = state_ptr + tl.load(rows_ptr + row).to(tl.int64) * stride_row + at
    state = tl.load(states, mask=in_state, other=0.0)
    a = tl.load(a_ptr + at, mask=in_state, other=0.0)
    skip = tl.load(d_ptr + i, mask=in_i, other=0.0)
    bias = tl.load(dt_bias_ptr + i, mask=in_i, other=0.0)
    for t in range(end - first):
        token = (first + t).to(tl.int64)
        x = tl.load(x_ptr + token * stride_x + i, mask=in_i, other=0.0).to(tl.float32)
        dt = softplus(tl.load(dt_ptr + token * stride_dt + i, mask=in_i, other=0.0).to(tl.float32) + bias)
        b = tl.load(b_ptr + token * stride_b + n, mask=in_n, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * stride_c + n, mask=in_n, other=0.0).to(tl.float32)
        state = state * tl.exp(dt[None, :] * a) + b[:, None] * (dt * x)[None, :]
        out = tl.sum(state * c[:, None], 0) + skip * x
        tl.store(out_ptr + token * num_channels + i, out.to(out_ptr.dtype.element_ty), mask=in_i)
    tl.store(states, state, mask=in_state)


def mamba1_scan_triton(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    state: Tensor,
    rows: StateRows,
    *,
    d: Tensor,
    dt_bias: Tensor,
) -> Tensor:
    """Arguments and result as in `mamba1_scan`."""
    num_tokens, num_channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    state_size = b.shape[1]
    keys = next_power_of_two(state_size)
    channels = max(16, min(64, 2048 // keys))  # as many as registers hold beside the factors of their decays
    mamba1_kernel[(rows.rows.shape[0], ceil_div(num_channels, channels))](
        *(x, dt, b, c, a, d, dt_bias, state, out, rows.rows, rows.query_start_loc),
        *(x.stride(0), dt.stride(0), b.stride(0), c.stride(0), state.stride(0), num_channels, state_size),
        KEYS=keys,
        CHANNELS=channels,
        num_warps=2 if keys <= 16 else 4,
    )
    return out
