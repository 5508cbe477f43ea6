"""Ragged batches with states, and random inputs of the scans."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.scan.causal_conv1d import ConvWeights
from penstock.kernels.scan.rows import StateRows

NUM_ROWS = 8  # of the state

RAGGED = ((1,), (1, 1, 1), (2,), (70,), (3, 1, 65, 0, 1), (64, 128))
"""New tokens of the rows of a batch."""


def state_rows(counts: tuple[int, ...], device: str = "cpu") -> StateRows:
    """Rows in no order, some of the state unused."""
    rows = torch.tensor([6, 2, 7, 0, 3][: len(counts)], dtype=torch.int32, device=device)
    starts = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32, device=device)
    return StateRows(rows, starts, max(counts))


class ScanCase(NamedTuple):
    heads: int = 4
    groups: int = 2  # or key heads
    value_dim: int = 16
    key_dim: int = 16  # or the state's size
    bare: bool = False  # no d, no bias of dt; a bound for dt'; or a greater limit of beta
    by_key: bool = False  # each number of a key decays by itself


SCAN_CASES = (
    ScanCase(), ScanCase(2, 1, 64, 128), ScanCase(3, 3, 32, 16, bare=True), ScanCase(6, 2, 24, 48),
    ScanCase(2, 1, 128, 64),
)  # fmt: skip


def mamba2_inputs(case: ScanCase, num_tokens: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """Arguments of `mamba2_scan` but the state and the rows; x, b and c are parts of one tensor, as in a model."""
    heads, groups, p, n, bare, _ = case
    joint = torch.randn(num_tokens, heads * p + 2 * groups * n, device=device).to(dtype)
    x, b, c = joint.split((heads * p, groups * n, groups * n), 1)
    return {
        "x": x.unflatten(1, (heads, p)),
        "dt": torch.randn(num_tokens, heads, device=device).to(dtype),
        "b": b.unflatten(1, (groups, n)),
        "c": c.unflatten(1, (groups, n)),
        "a": -torch.rand(heads, device=device) * 2 - 0.01,
        "d": None if bare else torch.randn(heads, device=device).to(dtype),
        "dt_bias": None if bare else torch.randn(heads, device=device).to(dtype),
        "dt_limit": (0.3, 1.5) if bare else (0.0, float("inf")),
    }


class ChannelsCase(NamedTuple):
    channels: int = 48
    state_size: int = 16


CHANNELS_CASES = (ChannelsCase(), ChannelsCase(200, 8), ChannelsCase(37, 5), ChannelsCase(128, 33))


def mamba1_inputs(case: ChannelsCase, num_tokens: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """Arguments of `mamba1_scan` but the state and the rows; x, b and c are parts of larger tensors, as in a model."""
    channels, size = case
    b, c = torch.randn(num_tokens, 2 * size, device=device).to(dtype).chunk(2, 1)
    return {
        "x": torch.randn(num_tokens, 2 * channels, device=device).to(dtype)[:, :channels],
        "dt": torch.randn(num_tokens, channels, device=device).to(dtype),
        "b": b,
        "c": c,
        "a": -torch.rand(size, channels, device=device) * 2 - 0.01,
        "d": torch.randn(channels, device=device),
        "dt_bias": torch.randn(channels, device=device),
    }


def mamba1_state(case: ChannelsCase, device: str = "cpu") -> Tensor:
    return torch.randn(NUM_ROWS, case.state_size, case.channels, device=device)


def mamba2_state(case: ScanCase, device: str = "cpu") -> Tensor:
    return torch.randn(NUM_ROWS, case.heads, case.key_dim, case.value_dim, device=device)


def gated_delta_inputs(case: ScanCase, num_tokens: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """Arguments of `gated_delta_scan` but the state and the rows."""
    heads, groups, v, k, _, by_key = case
    of_decays = (heads, k) if by_key else (heads,)
    joint = torch.randn(num_tokens, heads * v + 2 * groups * k, device=device).to(dtype)
    query, key, value = joint.split((groups * k, groups * k, heads * v), 1)
    return {
        "q": query.unflatten(1, (groups, k)),
        "k": key.unflatten(1, (groups, k)),
        "v": value.unflatten(1, (heads, v)),
        "dt": torch.randn(num_tokens, *of_decays, device=device).to(dtype),
        "b": torch.randn(num_tokens, heads, device=device).to(dtype),
        "a": -torch.rand(heads, device=device) * 2 - 0.01,
        "dt_bias": torch.randn(of_decays, device=device).to(dtype),
        "max_beta": 2.0 if case.bare else 1.0,
    }


DELTA_CASES = (*SCAN_CASES, ScanCase(by_key=True), ScanCase(4, 2, 24, 40, by_key=True, bare=True))


class ConvCase(NamedTuple):
    channels: int = 48
    width: int = 4
    has_bias: bool = True
    has_silu: bool = True
    is_gated: bool = False


CONV_CASES = (ConvCase(), ConvCase(40, 3, False, False, True), ConvCase(200, 4, False), ConvCase(16, 2, is_gated=True))


def conv_inputs(
    case: ConvCase, num_tokens: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, ConvWeights, Tensor | None, Tensor | None]:
    """(x, weights, input gate, output gate); x and the gates are parts of one tensor, as in a model."""
    channels, width, has_bias, has_silu, is_gated = case
    x, before, after = torch.randn(num_tokens, 3 * channels, device=device).to(dtype).chunk(3, 1)
    weight = torch.randn(channels, width, device=device).to(dtype) / 2
    bias = torch.randn(channels, device=device).to(dtype) if has_bias else None
    return x, ConvWeights(weight, bias, has_silu), before if is_gated else None, after if is_gated else None
