"""The scan of Mamba (Gu and Dao, 2023): each channel has a state of N numbers, and each of them decays by itself.

With dt' = softplus(dt + dt_bias), for each channel:  S = exp(dt' a) S + b (dt' x),  y = S . c + d x.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.scan.rows import StateRows

_CHUNK = 64
"""Tokens whose decays are computed together: one after the other, the states need little else."""


def mamba1_scan(
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
    """Scan each row's new tokens, beginning with its state. Computed in fp32.

    Args:
        x: [T, C].
        dt: [T, C], before bias and softplus.
        b: [T, N], for writing; all channels share it.
        c: [T, N], for reading.
        a: fp32[N, C], negative.
        state: fp32[R, N, C], updated in place.
        rows: of the batch.
        d: fp32[C], factor of x on its way past the state.
        dt_bias: fp32[C].

    Returns:
        [T, C], in the dtype of `x`.
    """
    _check(x, dt, b, c, a, state)
    if x.is_cuda:
        from penstock.kernels.triton.scan.mamba1 import mamba1_scan_triton

        return mamba1_scan_triton(x, dt, b, c, a, state, rows, d=d, dt_bias=dt_bias)
    dt = functional.softplus(dt.float() + dt_bias)
    written = dt * x
    b, c = b.float(), c.float()
    out = d * x
    if (singles := rows.singles) is not None:
        at, tokens = singles
        s = state.index_select(0, at) * (dt[tokens, None] * a).exp()
        s += b[tokens, :, None] * written[tokens, None]
        out.index_add_(0, tokens, (c[tokens, None] @ s)[:, 0])
        state.index_copy_(0, at, s)
    for row, begin, end in rows.runs:
        for i in range(begin, end, _CHUNK):
            now = slice(i, min(i + _CHUNK, end))
            out[now] += _chunk(written[now], dt[now], b[now], c[now], a, state[row])
    return out.to(x.dtype)


def _chunk(written: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, state: Tensor) -> Tensor:
    """What L tokens of a row read, fp32[L, C]; updates its state in place."""
    states = b[..., None] * written[:, None]  # [L, N, C]
    s = state
    for new, decay in zip(states, (dt[:, None] * a).exp_(), strict=True):
        s = new.add_(decay.mul_(s))
    state.copy_(s)
    return (c[:, None] @ states)[:, 0]


def mamba1_scan_reference(
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
    """Token by token in float64, rounded once; `state` is updated, too."""
    dt = functional.softplus(dt.double() + dt_bias.double())
    out = torch.empty_like(x)
    for row, begin, end in rows.all_runs:
        s = state[row].double()
        for t in range(begin, end):
            s = (dt[t] * a.double()).exp() * s + torch.outer(b[t].double(), dt[t] * x[t].double())
            out[t] = (c[t].double() @ s + d.double() * x[t].double()).to(x.dtype)
        state[row] = s.float()
    return out


def _check(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, state: Tensor) -> None:
    shape = (b.shape[1], x.shape[1])
    if dt.shape != x.shape or b.shape != c.shape or a.shape != shape or state.shape[1:] != shape:
        raise ValueError(f"x {tuple(x.shape)}, dt {tuple(dt.shape)}, b {tuple(b.shape)}, c {tuple(c.shape)} and a"
                         f" {tuple(a.shape)} do not fit state {tuple(state.shape)}")  # fmt: skip
    if state.dtype != torch.float32:
        raise ValueError(f"the state must be in fp32, not {state.dtype}")
