"""The short causal convolution of a ragged batch, which also updates the states."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.scan.causal_conv1d import ConvWeights
from penstock.kernels.scan.rows import StateRows
from penstock.kernels.triton.device import ceil_div, next_power_of_two

_TOKENS, _CHANNELS = 32, 128


@triton.jit
def inputs_at(
    x_ptr, gate_ptr, state_ptr, at, channels, mask, first, stride_x, stride_g, num_channels, WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """The inputs [positions, channels] at positions `at` of a row's new tokens; negative positions are in its state."""
    token = (first + at).to(tl.int64)
    is_new = mask & (at >= 0)
    u = tl.load(x_ptr + token * stride_x + channels, mask=is_new, other=0.0)
    if GATED:
        u = u * tl.load(gate_ptr + token * stride_g + channels, mask=is_new, other=0.0)
    kept = tl.load(state_ptr + (at + WIDTH - 1) * num_channels + channels, mask=mask & (at < 0), other=0.0)
    return u.to(tl.float32) + kept.to(tl.float32)


@triton.jit
def causal_conv1d_kernel(
    x_ptr, input_gate_ptr, output_gate_ptr, out_ptr, weight_ptr, bias_ptr, state_ptr, rows_ptr, start_ptr,
    num_channels, stride_x, stride_ig, stride_og, stride_row,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, GATES_INPUT: tl.constexpr, GATES_OUTPUT: tl.constexpr,
    COMPUTES: tl.constexpr, KEEPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Grid (N, blocks of tokens, blocks of channels). KEEPS: a single block of tokens also writes the state."""
    row = tl.program_id(0)
    first, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    count = end - first
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    in_row = c < num_channels
    state_ptr += tl.load(rows_ptr + row).to(tl.int64) * stride_row
    if COMPUTES:
        mask = (t < count) & in_row
        sums = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for j in tl.static_range(WIDTH):
            u = inputs_at(
                x_ptr, input_gate_ptr, state_ptr, t + j - (WIDTH - 1), c, mask, first, stride_x, stride_ig,
                num_channels, WIDTH, GATES_INPUT,
            )  # fmt: skip
            sums += u * tl.load(weight_ptr + c * WIDTH + j, mask=in_row, other=0.0).to(tl.float32)
        if BIAS:
            sums += tl.load(bias_ptr + c, mask=in_row, other=0.0).to(tl.float32)
        if SILU:
            sums = sums * tl.sigmoid(sums)
        token = (first + t).to(tl.int64)
        if GATES_OUTPUT:
            sums *= tl.load(output_gate_ptr + token * stride_og + c, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * num_channels + c, sums.to(out_ptr.dtype.element_ty), mask=mask)
    if KEEPS:
        j = tl.arange(0, KEPT)[:, None]
        mask = (j < WIDTH - 1) & in_row
        left = inputs_at(
            x_ptr, input_gate_ptr, state_ptr, count - (WIDTH - 1) + j, c, mask, first, stride_x, stride_ig,
            num_channels, WIDTH, GATES_INPUT,
        )  # fmt: skip
        tl.debug_barrier()  # until all threads have read the old state
        tl.store(state_ptr + j * num_channels + c, left.to(state_ptr.dtype.element_ty), mask=mask)


def causal_conv1d_triton(
    x: Tensor,
    weights: ConvWeights,
    state: Tensor,
    rows: StateRows,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
) -> Tensor:
    """Arguments and result as in `causal_conv1d`."""
    num_tokens, channels = x.shape
    out = torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    weight, bias, has_silu = weights
    width = weight.shape[1]
    tokens = min(_TOKENS, next_power_of_two(rows.max_query_len))
    num_blocks = ceil_div(rows.max_query_len, tokens)
    # A single block of tokens can write the state. Of several, none knows when the others have read the old state.
    passes = [(True, True, num_blocks)] if num_blocks == 1 else [(True, False, num_blocks), (False, True, 1)]
    for computes, keeps, blocks in passes:
        causal_conv1d_kernel[(rows.rows.shape[0], blocks, ceil_div(channels, _CHANNELS))](
            x,
            x if input_gate is None else input_gate,
            x if output_gate is None else output_gate,
            out,
            weight,
            weight if bias is None else bias,
            state,
            rows.rows,
            rows.query_start_loc,
            channels,
            x.stride(0),
            0 if input_gate is None else input_gate.stride(0),
            0 if output_gate is None else output_gate.stride(0),
            state.stride(0),
            WIDTH=width,
            BIAS=bias is not None,
            SILU=has_silu,
            GATES_INPUT=input_gate is not None,
            GATES_OUTPUT=output_gate is not None,
            COMPUTES=computes,
            KEEPS=keeps,
            TOKENS=tokens,
            CHANNELS=_CHANNELS,
            KEPT=next_power_of_two(width - 1),
            num_warps=4,
        )
    return out
