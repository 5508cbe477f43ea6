"""The scan of Mamba 2 (Dao and Gu, 2024): a state for each head that decays by one number a token.

With dt' = softplus(dt + dt_bias), clamped:  S = exp(dt' a) S + b (dt' x)^T,  y = S^T c + d x.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.scan.rows import StateRows

CHUNK = 64
"""Tokens that are computed together, as products of matrices."""


def mamba2_scan(
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
    """Scan each row's new tokens, beginning with its state. Computed in fp32.

    Args:
        x: [T, H, P].
        dt: [T, H], before bias and softplus.
        b: [T, G, N], for writing; head h uses group h // (H / G).
        c: [T, G, N], for reading.
        a: fp32[H], negative.
        state: fp32[R, H, N, P], updated in place.
        rows: of the batch.
        d: [H], factor of x on its way past the state; None for none.
        dt_bias: [H], None for none.
        dt_limit: the bounds of dt'.

    Returns:
        [T, H, P], in the dtype of `x`.
    """
    _check(x, dt, b, c, state)
    if x.is_cuda:
        from penstock.kernels.triton.scan.mamba2 import mamba2_scan_triton

        return mamba2_scan_triton(x, dt, b, c, a, state, rows, d=d, dt_bias=dt_bias, dt_limit=dt_limit)
    dt = _steps(dt, dt_bias, dt_limit)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    group = x.shape[1] // b.shape[1]
    if (singles := rows.singles) is not None:
        at, tokens = singles
        dt_s, x_s = dt[tokens], x[tokens].float()
        b_s, c_s = (each[tokens].float().repeat_interleave(group, 1) for each in (b, c))
        s = state.index_select(0, at) * (dt_s * a).exp()[..., None, None]
        s += b_s[..., None] * (dt_s[..., None] * x_s)[..., None, :]
        out.index_copy_(0, tokens, (c_s[..., None, :] @ s)[..., 0, :])
        state.index_copy_(0, at, s)
    for row, begin, end in rows.runs:
        s = state[row]
        for i in range(begin, end, CHUNK):
            tokens_of = slice(i, min(i + CHUNK, end))
            s = _chunk(x[tokens_of], dt[tokens_of], b[tokens_of], c[tokens_of], a, s, out[tokens_of])
        state[row] = s
    if d is not None:
        out += d.float()[:, None] * x
    return out.to(x.dtype)


def _chunk(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, state: Tensor, out: Tensor) -> Tensor:
    """Compute L tokens of a row into `out` -> the state after them, a new tensor."""
    group = x.shape[1] // b.shape[1]
    b, c = (each.float().transpose(0, 1) for each in (b, c))  # [G, L, N]
    values = (x * dt[..., None]).transpose(0, 1)  # [H, L, P]
    decay = (dt * a).T.cumsum(1)  # [H, L], its logarithm since the chunk began
    since = decay[:, :, None] - decay[:, None, :]
    hidden = torch.ones(since.shape[1:], dtype=torch.bool, device=x.device).triu_(1)
    seen = since.masked_fill_(hidden, -torch.inf).exp_()
    seen *= (c @ b.transpose(1, 2)).repeat_interleave(group, 0)
    read = c.repeat_interleave(group, 0) @ state
    torch.baddbmm(read.mul_(decay.exp()[..., None]), seen, values, out=read)
    out.copy_(read.transpose(0, 1))
    left = (decay[:, -1:] - decay).exp()[..., None]
    written = (b.repeat_interleave(group, 0) * left).transpose(1, 2)  # [H, N, L]
    return torch.baddbmm(state * decay[:, -1].exp()[:, None, None], written, values)


def mamba2_scan_reference(
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
    """Token by token in float64, rounded once; `state` is updated, too."""
    dt = _steps(dt, dt_bias, dt_limit).double()
    group = x.shape[1] // b.shape[1]
    b, c = (each.double().repeat_interleave(group, 1) for each in (b, c))
    out = torch.empty_like(x)
    for row, begin, end in rows.all_runs:
        s = state[row].double()
        for t in range(begin, end):
            decay = (dt[t] * a.double()).exp()
            s = decay[:, None, None] * s + torch.einsum("hn,hp->hnp", b[t], dt[t][:, None] * x[t].double())
            y = torch.einsum("hn,hnp->hp", c[t], s)
            if d is not None:
                y = y + d.double()[:, None] * x[t].double()
            out[t] = y.to(x.dtype)
        state[row] = s.float()
    return out


def _steps(dt: Tensor, dt_bias: Tensor | None, dt_limit: tuple[float, float]) -> Tensor:
    """dt', fp32[T, H]"""
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    return functional.softplus(dt).clamp_(*dt_limit)


def _check(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor) -> None:
    num_heads, head_dim = x.shape[1:]
    if dt.shape != x.shape[:2] or b.shape != c.shape or state.shape[1:] != (num_heads, b.shape[2], head_dim):
        raise ValueError(f"x {tuple(x.shape)}, dt {tuple(dt.shape)}, b {tuple(b.shape)} and c {tuple(c.shape)}"
                         f" do not fit state {tuple(state.shape)}")  # fmt: skip
    if num_heads % b.shape[1]:
        raise ValueError(f"{num_heads} heads cannot share {b.shape[1]} groups")
    if state.dtype != torch.float32:
        raise ValueError(f"the state must be in fp32, not {state.dtype}")
