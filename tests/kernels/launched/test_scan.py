"""What recurrent layers compute."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.scan.causal_conv1d import causal_conv1d_reference
from penstock.kernels.scan.gated_delta import gated_delta_scan_reference
from penstock.kernels.scan.gated_norm import GatedNorm, gated_norm_reference
from penstock.kernels.scan.mamba1 import mamba1_scan_reference
from penstock.kernels.scan.mamba2 import mamba2_scan_reference
from penstock.kernels.triton.scan.causal_conv1d import causal_conv1d_triton
from penstock.kernels.triton.scan.gated_delta import gated_delta_scan_triton
from penstock.kernels.triton.scan.gated_norm import gated_norm_triton
from penstock.kernels.triton.scan.mamba1 import mamba1_scan_triton
from penstock.kernels.triton.scan.mamba2 import mamba2_scan_triton
from tests.kernels.pairs import pairwise
from tests.kernels.scan_cases import (
    CHANNELS_CASES,
    CONV_CASES,
    DELTA_CASES,
    NUM_ROWS,
    SCAN_CASES,
    ChannelsCase,
    ConvCase,
    ScanCase,
    conv_inputs,
    gated_delta_inputs,
    mamba1_inputs,
    mamba1_state,
    mamba2_inputs,
    mamba2_state,
    state_rows,
)
from tests.kernels.tolerances import assert_near

_COUNTS = ((1, 1), (3, 1, 40, 0, 1))
_PAIRS = pairwise(_COUNTS, SCAN_CASES[:4])


def near(got: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """As `assert_near`, relative to the largest number: sums of many terms cancel."""
    assert_near(got, expected, factor * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize(("counts", "case"), pairwise(_COUNTS, CONV_CASES))
def test_causal_conv1d(device: str, dtype: torch.dtype, counts: tuple[int, ...], case: ConvCase) -> None:
    x, weights, before, after = conv_inputs(case, sum(counts), dtype, device)
    states = torch.randn(NUM_ROWS, case.width - 1, case.channels, device=device).repeat(2, 1, 1, 1)
    rows = state_rows(counts, device)
    expected = causal_conv1d_reference(x, weights, states[0], rows, before, after)
    near(causal_conv1d_triton(x, weights, states[1], rows, before, after), expected)
    assert_near(states[1], states[0])


@pytest.mark.parametrize(("counts", "case"), pairwise(_COUNTS, CHANNELS_CASES))
def test_mamba1_scan(device: str, dtype: torch.dtype, counts: tuple[int, ...], case: ChannelsCase) -> None:
    inputs, rows = mamba1_inputs(case, sum(counts), dtype, device), state_rows(counts, device)
    states = mamba1_state(case, device).repeat(2, 1, 1, 1)
    expected = mamba1_scan_reference(**inputs, state=states[0], rows=rows)
    near(mamba1_scan_triton(**inputs, state=states[1], rows=rows), expected)
    near(states[1], states[0])


@pytest.mark.parametrize(("counts", "case"), _PAIRS)
def test_mamba2_scan(device: str, dtype: torch.dtype, counts: tuple[int, ...], case: ScanCase) -> None:
    inputs, rows = mamba2_inputs(case, sum(counts), dtype, device), state_rows(counts, device)
    states = mamba2_state(case, device).repeat(2, 1, 1, 1, 1)
    expected = mamba2_scan_reference(**inputs, state=states[0], rows=rows)
    # Products of chunks are in tf32 where activations have 16 bits.
    factor = 1.0 if dtype == torch.float32 else 4.0
    near(mamba2_scan_triton(**inputs, state=states[1], rows=rows), expected, factor)
    near(states[1], states[0], factor if dtype == torch.float32 or device == "cpu" else 200)


@pytest.mark.parametrize(("counts", "case"), pairwise(_COUNTS, (*SCAN_CASES[:4], *DELTA_CASES[-2:])))
def test_gated_delta_scan(device: str, dtype: torch.dtype, counts: tuple[int, ...], case: ScanCase) -> None:
    inputs, rows = gated_delta_inputs(case, sum(counts), dtype, device), state_rows(counts, device)
    states = mamba2_state(case, device).repeat(2, 1, 1, 1, 1)
    expected = gated_delta_scan_reference(**inputs, state=states[0], rows=rows)
    near(gated_delta_scan_triton(**inputs, state=states[1], rows=rows, eps=1e-6), expected, 4)
    near(states[1], states[0], 4 if dtype == torch.float32 or device == "cpu" else 200)


def test_a_prompt_that_repeats_itself(device: str, dtype: torch.dtype) -> None:
    """Equal keys, which write all that they may and are never forgotten: the equations are as hard as they can be."""
    case = ScanCase()
    inputs, rows = gated_delta_inputs(case, 100, dtype, device), state_rows((100,), device)
    inputs |= {"k": inputs["k"][:1].expand(100, -1, -1).contiguous(), "a": torch.full((case.heads,), -1e-6)}
    inputs |= {"a": inputs["a"].to(device), "b": torch.full_like(inputs["b"], 8)}
    states = mamba2_state(case, device).repeat(2, 1, 1, 1, 1)
    expected = gated_delta_scan_reference(**inputs, state=states[0], rows=rows)
    near(gated_delta_scan_triton(**inputs, state=states[1], rows=rows, eps=1e-6), expected, 4)


@pytest.mark.parametrize(
    ("size", "norms_first", "is_sigmoid"),
    [(48, False, False), (16, False, False), (16, True, False), (16, True, True), (0, False, False)],
)
def test_gated_norm(device: str, dtype: torch.dtype, size: int, norms_first: bool, is_sigmoid: bool) -> None:
    x, gate = torch.randn(2, 3, 48, device=device).to(dtype)
    weights = GatedNorm()
    if size:
        held = size if norms_first else 48
        weights = GatedNorm((1 + torch.randn(held, device=device) / 2).to(dtype), 1e-5, size, norms_first, is_sigmoid)
    assert_near(gated_norm_triton(x, gate, weights), gated_norm_reference(x, gate, weights))
