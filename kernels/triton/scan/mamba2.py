"""The scan of Mamba 2: chunks of a prompt as products of matrices, and single tokens.

Each program computes a block of values of a head of a row. The state stays in registers from chunk to chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.scan.rows import StateRows
from penstock.kernels.triton.device import ceil_div, next_power_of_two

_FLOAT_MAX = 3.4028234663852886e38


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def mamba2_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, dt_bias_ptr, state_ptr, out_ptr, rows_ptr, start_ptr,
    stride_x, stride_dt, stride_b, stride_c, stride_row, num_heads, heads_of_group, head_dim, state_size,
    min_dt, max_dt,
    SKIP: tl.constexpr, BIAS: tl.constexpr, IN_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N, H, blocks of values). IN_CHUNKS: rows with several tokens, else those with one."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    count = end - first
    if IN_CHUNKS:
        if count < 2:
            return
    elif count != 1:
        return
    n, p = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_n, in_p = n < state_size, p < head_dim
    in_state = in_n[:, None] & in_p[None, :]
    states = state_ptr + tl.load(rows_ptr + row).to(tl.int64) * stride_row + head * state_size * head_dim
    states += n[:, None] * head_dim + p[None, :]
    state = tl.load(states, mask=in_state, other=0.0)
    group = head // heads_of_group * state_size
    a = tl.load(a_ptr + head)
    bias = 0.0
    if BIAS:
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    skip = 0.0
    if SKIP:
        skip = tl.load(d_ptr + head).to(tl.float32)
    if IN_CHUNKS:
        for begin in range(0, count, CHUNK):
            i = tl.arange(0, CHUNK)
            token = (first + begin + i).to(tl.int64)
            is_new = begin + i < count
            in_x, in_c = is_new[:, None] & in_p[None, :], is_new[:, None] & in_n[None, :]
            in_b = in_n[:, None] & is_new[None, :]
            dt = softplus(tl.load(dt_ptr + token * stride_dt + head, mask=is_new, other=0.0).to(tl.float32) + bias)
            dt = tl.where(is_new, tl.minimum(tl.maximum(dt, min_dt), max_dt), 0.0)  # others neither write nor decay
            x = tl.load(x_ptr + token[:, None] * stride_x + head * head_dim + p[None, :], mask=in_x, other=0.0)
            b = tl.load(b_ptr + token[None, :] * stride_b + group + n[:, None], mask=in_b, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + token[:, None] * stride_c + group + n[None, :], mask=in_c, other=0.0).to(tl.float32)
            x = x.to(tl.float32)
            written = x * dt[:, None]
            decay = tl.cumsum(dt * a, 0)
            total = tl.sum(dt * a, 0)
            since = tl.where(i[:, None] >= i[None, :], decay[:, None] - decay[None, :], float("-inf"))
            seen = tl.dot(c, b, input_precision=PRECISION) * tl.exp(since)
            read = tl.dot(c, state, input_precision=PRECISION) * tl.exp(decay)[:, None]
            read += tl.dot(seen, written, input_precision=PRECISION)
            left = b * tl.exp(total - decay)[None, :]
            state = state * tl.exp(total) + tl.dot(left, written, input_precision=PRECISION)
            out = read + skip * x
            tl.store(out_ptr + (token[:, None] * num_heads + head) * head_dim + p[None, :],
                     out.to(out_ptr.dtype.element_ty), mask=in_x)  # fmt: skip
    else:
        token = first.to(tl.int64)
        dt = softplus(tl.load(dt_ptr + token * stride_dt + head).to(tl.float32) + bias)
        dt = tl.minimum(tl.maximum(dt, min_dt), max_dt)
        x = tl.load(x_ptr + token * stride_x + head * head_dim + p, mask=in_p, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + token * stride_b + group + n, mask=in_n, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * stride_c + group + n, mask=in_n, other=0.0).to(tl.float32)
        state = state * tl.exp(dt * a) + b[:, None] * (dt * x)[None, :]
        out = tl.sum(state * c[:, None], 0) + skip * x
        tl.store(out_ptr + (token * num_heads + head) * head_dim + p, out.to(out_ptr.dtype.element_ty), mask=in_p)
    tl.store(states, state, mask=in_state)


def mamba2_scan_triton(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    state: Tensor,
    rows: StateRows,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Arguments and result as in `mamba2_scan`."""
    num_tokens, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    num_groups, state_size = b.shape[1:]
    keys = max(16, next_power_of_two(state_size))
    values = min(32 if keys <= 128 else 16, max(16, next_power_of_two(head_dim)))
    for in_chunks in (False, True) if rows.max_query_len > 1 else (False,):
        mamba2_kernel[(rows.rows.shape[0], num_heads, ceil_div(head_dim, values))](
            x,
            dt,
            b,
            c,
            a,
            a if d is None else d,
            a if dt_bias is None else dt_bias,
            state,
            out,
            rows.rows,
            rows.query_start_loc,
            x.stride(0),
            dt.stride(0),
            b.stride(0),
            c.stride(0),
            state.stride(0),
            num_heads,
            num_heads // num_groups,
            head_dim,
            state_size,
            max(dt_limit[0], 0.0),
            min(dt_limit[1], _FLOAT_MAX),
            SKIP=d is not None,
            BIAS=dt_bias is not None,
            IN_CHUNKS=in_chunks,
            CHUNK=16 if keys > 128 else 32,
            KEYS=keys,
            VALUES=values,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=8 if in_chunks and keys > 64 else 4,  # more registers for a large state
        )
    return out
