"""The gated delta rule over prompts, as products of matrices (Yang, Wang, Zhang, Shen and Kim, 2024).

What a token writes depends on what earlier tokens of its chunk have written. With A[i, j] = beta[i] (k[i] . k[j])
exp(decay[i] - decay[j]) for j < i, and P[i, j] = (q[i] . k[j]) exp(decay[i] - decay[j]) for j <= i:

    wanted = v - exp(decay) k S;  written = (I + A)^-1 diag(beta) wanted;  y = exp(decay) q S + P written

The factors of `wanted` do not depend on the state. The first kernel computes them for all chunks at once, and the
second one scans.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.scan.rows import StateRows
from penstock.kernels.triton.device import ceil_div, next_power_of_two
from penstock.kernels.triton.scan.mamba2 import softplus


@triton.jit
def _unit_rows(ptr, token, stride, of_head, is_new, size, eps, SIZE: tl.constexpr):
    """Load a head's keys or queries of a chunk, normed to length 1; zeros for missing tokens."""
    n = tl.arange(0, SIZE)
    wanted = is_new[:, None] & (n < size)[None, :]
    x = tl.load(ptr + token[:, None] * stride + of_head + n[None, :], mask=wanted, other=0.0).to(tl.float32)
    return x / tl.sqrt(tl.sum(x * x, 1) + eps)[:, None]


@triton.jit
def _log_decays(dt_ptr, a_ptr, dt_bias_ptr, token, stride, head, is_new):
    """The logarithm of each token's decay of the state; 0 for missing tokens."""
    dt = tl.load(dt_ptr + token * stride + head, mask=is_new, other=0.0).to(tl.float32)
    decay = tl.load(a_ptr + head) * softplus(dt + tl.load(dt_bias_ptr + head).to(tl.float32))
    return tl.where(is_new, decay, 0.0)


@triton.jit
def solve_chunks_kernel(
    q_ptr, k_ptr, dt_ptr, b_ptr, a_ptr, dt_bias_ptr, solved_ptr, start_ptr, stride_q, stride_k, stride_dt, stride_b,
    num_heads, heads_of_key, key_dim, scale, eps, max_beta,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N, chunks, H): W = (I + A)^-1 diag(beta) of a chunk, and P W; each has a row for each of its tokens."""
    row, begin, head = tl.program_id(0), tl.program_id(1) * CHUNK, tl.program_id(2)
    first, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    count = end - first
    if (count < 2) | (begin >= count):
        return
    i = tl.arange(0, CHUNK)
    is_new = begin + i < count
    token = (first + begin + i).to(tl.int64)
    of_key = head // heads_of_key * key_dim
    k = _unit_rows(k_ptr, token, stride_k, of_key, is_new, key_dim, eps, KEYS)
    decay = tl.cumsum(_log_decays(dt_ptr, a_ptr, dt_bias_ptr, token, stride_dt, head, is_new), 0)
    beta = max_beta * tl.sigmoid(tl.load(b_ptr + token * stride_b + head, mask=is_new, other=0.0).to(tl.float32))
    since = tl.exp(tl.where(i[:, None] >= i[None, :], decay[:, None] - decay[None, :], float("-inf")))
    system = tl.where(i[:, None] > i[None, :], tl.dot(k, tl.trans(k), input_precision=PRECISION) * since, 0.0)
    system *= beta[:, None]
    solved = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for now in range(1, CHUNK):  # row by row from the top, since each row needs those above it
        is_now = i[:, None] == now
        its = tl.sum(tl.where(is_now, system, 0.0), 0)
        solved = tl.where(is_now, solved - tl.sum(its[:, None] * solved, 0)[None, :], solved)
    solved *= tl.where(is_new, beta, 0.0)[None, :]
    q = _unit_rows(q_ptr, token, stride_q, of_key, is_new, key_dim, eps, KEYS) * scale
    seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * since
    at = solved_ptr + (token[:, None] * num_heads + head) * (2 * CHUNK) + i[None, :]
    tl.store(at, solved, mask=is_new[:, None])
    tl.store(at + CHUNK, tl.dot(seen, solved, input_precision=PRECISION), mask=is_new[:, None])


@triton.jit
def scan_chunks_kernel(
    q_ptr, k_ptr, v_ptr, dt_ptr, a_ptr, dt_bias_ptr, solved_ptr, state_ptr, out_ptr, rows_ptr, start_ptr,
    stride_q, stride_k, stride_v, stride_dt, stride_row, num_heads, heads_of_key, key_dim, value_dim, scale, eps,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N, H, blocks of values); the state stays in registers from chunk to chunk."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    count = end - first
    if count < 2:
        return
    n, j = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_state = (n < key_dim)[:, None] & (j < value_dim)[None, :]
    states = state_ptr + tl.load(rows_ptr + row).to(tl.int64) * stride_row + head * key_dim * value_dim
    states += n[:, None] * value_dim + j[None, :]
    state = tl.load(states, mask=in_state, other=0.0)
    of_key = head // heads_of_key * key_dim
    i = tl.arange(0, CHUNK)
    for begin in range(0, count, CHUNK):
        is_new = begin + i < count
        token = (first + begin + i).to(tl.int64)
        in_v = is_new[:, None] & (j < value_dim)[None, :]
        log_decays = _log_decays(dt_ptr, a_ptr, dt_bias_ptr, token, stride_dt, head, is_new)
        decay, total = tl.cumsum(log_decays, 0), tl.sum(log_decays, 0)
        start = tl.exp(decay)[:, None]
        solved = solved_ptr + (token[:, None] * num_heads + head) * (2 * CHUNK) + i[None, :]
        v = tl.load(v_ptr + token[:, None] * stride_v + head * value_dim + j[None, :], mask=in_v, other=0.0)
        k = _unit_rows(k_ptr, token, stride_k, of_key, is_new, key_dim, eps, KEYS)
        wanted = v.to(tl.float32) - start * tl.dot(k, state, input_precision=PRECISION)
        q = _unit_rows(q_ptr, token, stride_q, of_key, is_new, key_dim, eps, KEYS) * (scale * start)
        out = tl.dot(q, state, input_precision=PRECISION)
        read = tl.load(solved + CHUNK, mask=is_new[:, None], other=0.0)
        out += tl.dot(read, wanted, input_precision=PRECISION)
        tl.store(out_ptr + (token[:, None] * num_heads + head) * value_dim + j[None, :],
                 out.to(out_ptr.dtype.element_ty), mask=in_v)  # fmt: skip
        write = tl.load(solved, mask=is_new[:, None], other=0.0)
        written = tl.dot(write, wanted, input_precision=PRECISION)
        left = tl.trans(k * tl.exp(total - decay)[:, None])
        state = state * tl.exp(total) + tl.dot(left, written, input_precision=PRECISION)
    tl.store(states, state, mask=in_state)


def scan_chunks(
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
    out: Tensor,
) -> None:
    """Scan the rows that have several new tokens, into `out`; arguments as in `gated_delta_scan_triton`."""
    num_tokens, num_heads, value_dim = v.shape
    num_key_heads, key_dim = k.shape[1:]
    num_rows, heads_of_key = rows.rows.shape[0], num_heads // num_key_heads
    keys, values = max(16, next_power_of_two(key_dim)), 16  # more values, or tokens, would not fit the registers
    chunk = 32 if keys <= 128 else 16
    precision = "ieee" if v.dtype == torch.float32 else "tf32"
    solved = torch.empty(num_tokens, num_heads, 2, chunk, dtype=torch.float32, device=v.device)
    solve_chunks_kernel[(num_rows, ceil_div(rows.max_query_len, chunk), num_heads)](
        *(q, k, dt, b, a, dt_bias, solved, rows.query_start_loc),
        *(q.stride(0), k.stride(0), dt.stride(0), b.stride(0)),
        *(num_heads, heads_of_key, key_dim, key_dim**-0.5, eps, max_beta),
        CHUNK=chunk,
        KEYS=keys,
        PRECISION=precision,
        num_warps=4,
    )
    scan_chunks_kernel[(num_rows, num_heads, ceil_div(value_dim, values))](
        *(q, k, v, dt, a, dt_bias, solved, state, out, rows.rows, rows.query_start_loc),
        *(q.stride(0), k.stride(0), v.stride(0), dt.stride(0), state.stride(0)),
        *(num_heads, heads_of_key, key_dim, value_dim, key_dim**-0.5, eps),
        CHUNK=chunk,
        KEYS=keys,
        VALUES=values,
        PRECISION=precision,
        num_warps=4,
    )
