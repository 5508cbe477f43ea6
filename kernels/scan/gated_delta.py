"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2024): the state learns a value for each key, and decays.

With q and k of unit length, q times K^-1/2, g = a softplus(dt + dt_bias) and
beta = max_beta sigmoid(b):

    S = exp(g) S;  S += k (beta (v - S^T k))^T;  y = S^T q

A head decays by one number a token; in Kimi Delta Attention (Moonshot AI, 2025), by one for each number of a key.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.scan.rows import StateRows

CHUNK = 64
"""Tokens that are computed together, as products of matrices."""
_CHUNK_BY_KEY = 16
"""The same where each pair of tokens has a decay for each number of a key."""
_EPS = 1e-6  # added to the squares of keys and queries


def gated_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    b: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: StateRows,
    max_beta: float = 1.0,
) -> Tensor:
    """Scan each row's new tokens, beginning with its state. Computed in fp32.

    Args:
        q: [T, Hk, K], of any length; value head h uses key head h // (H / Hk).
        k: [T, Hk, K], of any length.
        v: [T, H, V].
        dt: [T, H], or [T, H, K] if each number of a key decays by itself; before bias and softplus.
        b: [T, H], before the sigmoid.
        a: fp32[H], negative.
        dt_bias: [H], or [H, K].
        state: fp32[R, H, K, V], updated in place.
        rows: of the batch.
        max_beta: the limit of beta.

    Returns:
        [T, H, V], in the dtype of `v`.
    """
    _check(q, k, v, dt, b, dt_bias, state)
    if v.is_cuda:
        from penstock.kernels.triton.scan.gated_delta import gated_delta_scan_triton

        return gated_delta_scan_triton(q, k, v, dt, b, a, dt_bias, state, rows, _EPS, max_beta)
    group = v.shape[1] // k.shape[1]
    q, k = (_unit(each.float()).repeat_interleave(group, 1) for each in (q, k))
    q = q * k.shape[2] ** -0.5
    g = _by_head(a, dt) * functional.softplus(dt.float() + dt_bias.float())
    g, chunk = (g[..., None], CHUNK) if g.ndim == 2 else (g, _CHUNK_BY_KEY)  # [T, H, 1 or K]
    beta = max_beta * b.float().sigmoid()
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    if (singles := rows.singles) is not None:
        at, tokens = singles
        k_s = k[tokens]
        s = state.index_select(0, at) * g[tokens].exp()[..., None]
        delta = (v[tokens] - (k_s[..., None, :] @ s)[..., 0, :]) * beta[tokens][..., None]
        s += k_s[..., None] * delta[..., None, :]
        out.index_copy_(0, tokens, (q[tokens][..., None, :] @ s)[..., 0, :])
        state.index_copy_(0, at, s)
    for row, begin, end in rows.runs:
        s = state[row]
        for i in range(begin, end, chunk):
            now = slice(i, min(i + chunk, end))
            s = _chunk(q[now], k[now], v[now].float(), g[now], beta[now], s, out[now])
        state[row] = s
    return out.to(v.dtype)


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, out: Tensor) -> Tensor:
    """Compute L tokens of a row into `out` -> the state after them, a new tensor.

    What a token writes depends on what earlier tokens of the chunk have written, so a triangular system is solved.
    """
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))  # [H, L, ...]
    decay = g.transpose(0, 1).cumsum(1)  # [H, L, 1 or K], its logarithm since the chunk began
    since = decay[:, :, None] - decay[:, None, :]
    hidden = torch.ones(since.shape[1:3], dtype=torch.bool, device=q.device).triu_(1)
    seen = since.masked_fill_(hidden[..., None], -torch.inf).exp_()
    learned = beta.T[..., None]
    start = decay.exp()
    wanted = learned * (v - (start * k) @ state)
    system = _products(learned * k, k, seen)
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    read = torch.baddbmm((start * q) @ state, _products(q, k, seen), written)
    out.copy_(read.transpose(0, 1))
    left = (decay[:, -1:] - decay).exp()
    return torch.baddbmm(state * decay[:, -1, :, None].exp(), (k * left).transpose(1, 2), written)


def _products(x: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """The product of each token's vector with each earlier key as it has decayed: [H, L, L]."""
    if seen.shape[-1] == 1:
        return x @ k.transpose(1, 2) * seen[..., 0]
    return (x[:, :, None] * seen * k[:, None]).sum(-1)


def gated_delta_scan_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    b: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: StateRows,
    max_beta: float = 1.0,
) -> Tensor:
    """Token by token in float64, rounded once; `state` is updated, too."""
    group = v.shape[1] // k.shape[1]
    q, k = (_unit(each.double()).repeat_interleave(group, 1) for each in (q, k))
    q = q * k.shape[2] ** -0.5
    g = _by_head(a, dt).double() * functional.softplus(dt.double() + dt_bias.double())
    g = g if g.ndim == 3 else g[..., None]
    beta = max_beta * b.double().sigmoid()
    out = torch.empty_like(v)
    for row, begin, end in rows.all_runs:
        s = state[row].double()
        for t in range(begin, end):
            s = g[t].exp()[..., None] * s
            delta = beta[t][:, None] * (v[t].double() - torch.einsum("hk,hkv->hv", k[t], s))
            s = s + torch.einsum("hk,hv->hkv", k[t], delta)
            out[t] = torch.einsum("hk,hkv->hv", q[t], s).to(v.dtype)
        state[row] = s.float()
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def _by_head(a: Tensor, dt: Tensor) -> Tensor:
    """`a`, to be multiplied with `dt`."""
    return a if dt.ndim == 2 else a[:, None]


def _check(q: Tensor, k: Tensor, v: Tensor, dt: Tensor, b: Tensor, dt_bias: Tensor, state: Tensor) -> None:
    num_heads, value_dim = v.shape[1:]
    by_key = k.shape[2:] if dt.ndim == 3 else ()
    if q.shape != k.shape or (*v.shape[:2], *by_key) != dt.shape or v.shape[:2] != b.shape or state.shape[1:] != (
        num_heads, k.shape[2], value_dim,
    ):  # fmt: skip
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, dt {tuple(dt.shape)} and b"
                         f" {tuple(b.shape)} do not fit state {tuple(state.shape)}")  # fmt: skip
    if dt_bias.shape != dt.shape[1:]:
        raise ValueError(f"dt_bias {tuple(dt_bias.shape)} does not fit dt {tuple(dt.shape)}")
    if num_heads % k.shape[1]:
        raise ValueError(f"{num_heads} value heads cannot share {k.shape[1]} key heads")
    if state.dtype != torch.float32:
        raise ValueError(f"the state must be in fp32, not {state.dtype}")
