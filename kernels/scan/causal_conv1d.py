"""A short causal convolution over each channel of a row's tokens. The row's last inputs are its state."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.scan.rows import StateRows


class ConvWeights(NamedTuple):
    """A convolution over the last K inputs of each channel."""

    weight: Tensor  # [C, K], the newest input's weight last
    bias: Tensor | None = None  # [C]
    has_silu: bool = True


def causal_conv1d(
    x: Tensor,
    weights: ConvWeights,
    state: Tensor,
    rows: StateRows,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
) -> Tensor:
    """`output_gate * silu(bias + sum over j of weight[:, j] * u[t - K + 1 + j])` of `u = input_gate * x`, in fp32.

    Args:
        x: [T, C], the channels contiguous.
        weights: of the convolution, in the dtype of `x`.
        state: [R, K - 1, C], each row's last inputs u, the newest last; updated in place.
        rows: of the batch.
        input_gate: [T, C], multiplies the inputs; None for none.
        output_gate: [T, C], multiplies the outputs; None for none.

    Returns:
        [T, C], in the dtype of `x`.
    """
    channels, width = weights.weight.shape
    if x.ndim != 2 or x.shape[1] != channels or state.shape[1:] != (width - 1, channels):
        raise ValueError(f"x {tuple(x.shape)} and state {tuple(state.shape)} do not fit {channels} channels of {width}")
    if x.is_cuda:
        from penstock.kernels.triton.scan.causal_conv1d import causal_conv1d_triton

        return causal_conv1d_triton(x, weights, state, rows, input_gate, output_gate)
    weight, bias, has_silu = weights
    taps = weight.float()[:, None]
    u = (x if input_gate is None else x * input_gate).float()
    out = torch.empty_like(u)
    if (singles := rows.singles) is not None:
        at, tokens = singles
        window = torch.cat((state.index_select(0, at).float(), u.index_select(0, tokens)[:, None]), 1)  # [S, K, C]
        state.index_copy_(0, at, window[:, 1:].to(state.dtype))
        out.index_copy_(0, tokens, (window * taps[:, 0].T).sum(1))
    for row, begin, end in rows.runs:
        inputs = torch.cat((state[row].float(), u[begin:end]))
        state[row] = inputs[end - begin :]
        out[begin:end] = functional.conv1d(inputs.T[None], taps, groups=channels)[0].T
    if bias is not None:
        out += bias
    if has_silu:
        functional.silu(out, inplace=True)
    if output_gate is not None:
        out *= output_gate
    return out.to(x.dtype)


def causal_conv1d_reference(
    x: Tensor,
    weights: ConvWeights,
    state: Tensor,
    rows: StateRows,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
) -> Tensor:
    """Token by token in float64, rounded once; `state` is updated, too."""
    weight, bias, has_silu = weights
    out = torch.empty_like(x)
    for row, begin, end in rows.all_runs:
        for t in range(begin, end):
            u = x[t] if input_gate is None else x[t] * input_gate[t]
            window = torch.cat((state[row].double(), u[None].double()))
            y = (window.T * weight.double()).sum(1)
            if bias is not None:
                y = y + bias.double()
            if has_silu:
                y = y * torch.sigmoid(y)
            if output_gate is not None:
                y = y * output_gate[t].double()
            out[t] = y.to(x.dtype)
            state[row] = window[1:].to(state.dtype)
    return out
