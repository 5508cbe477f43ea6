"""The CPU path of what recurrent layers compute against its plain references."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.scan.causal_conv1d import ConvWeights, causal_conv1d, causal_conv1d_reference
from penstock.kernels.scan.gated_delta import gated_delta_scan, gated_delta_scan_reference
from penstock.kernels.scan.gated_norm import GatedNorm, gated_norm, gated_norm_reference
from penstock.kernels.scan.mamba1 import mamba1_scan, mamba1_scan_reference
from penstock.kernels.scan.mamba2 import mamba2_scan, mamba2_scan_reference
from penstock.kernels.scan.rows import StateRows
from tests.kernels.pairs import every
from tests.kernels.scan_cases import (
    CHANNELS_CASES,
    CONV_CASES,
    DELTA_CASES,
    NUM_ROWS,
    RAGGED,
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

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def near(got: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """As `assert_near`, relative to the largest number: sums of many terms cancel."""
    assert_near(got, expected, factor * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize(("dtype", "counts", "case"), every(DTYPES, RAGGED, CONV_CASES))
def test_causal_conv1d(dtype: torch.dtype, counts: tuple[int, ...], case: ConvCase) -> None:
    x, weights, before, after = conv_inputs(case, sum(counts), dtype)
    states = torch.randn(NUM_ROWS, case.width - 1, case.channels).to(dtype).repeat(2, 1, 1, 1)
    expected = causal_conv1d_reference(x, weights, states[0], state_rows(counts), before, after)
    near(causal_conv1d(x, weights, states[1], state_rows(counts), before, after), expected)
    assert_near(states[1], states[0])


@pytest.mark.parametrize(("dtype", "counts", "case"), every(DTYPES, RAGGED, CHANNELS_CASES))
def test_mamba1_scan(dtype: torch.dtype, counts: tuple[int, ...], case: ChannelsCase) -> None:
    inputs, state = mamba1_inputs(case, sum(counts), dtype), mamba1_state(case)
    states = state.repeat(2, 1, 1, 1)
    expected = mamba1_scan_reference(**inputs, state=states[0], rows=state_rows(counts))
    near(mamba1_scan(**inputs, state=states[1], rows=state_rows(counts)), expected)
    near(states[1], states[0])
    unused = [1, 4, 5]
    assert torch.equal(states[1][unused], state[unused])


@pytest.mark.parametrize(("dtype", "counts", "case"), every(DTYPES, RAGGED, SCAN_CASES))
def test_mamba2_scan(dtype: torch.dtype, counts: tuple[int, ...], case: ScanCase) -> None:
    inputs, state = mamba2_inputs(case, sum(counts), dtype), mamba2_state(case)
    states = state.repeat(2, 1, 1, 1, 1)
    expected = mamba2_scan_reference(**inputs, state=states[0], rows=state_rows(counts))
    near(mamba2_scan(**inputs, state=states[1], rows=state_rows(counts)), expected)
    near(states[1], states[0])
    unused = [1, 4, 5]
    assert torch.equal(states[1][unused], state[unused])


@pytest.mark.parametrize(("dtype", "counts", "case"), every(DTYPES, RAGGED, DELTA_CASES))
def test_gated_delta_scan(dtype: torch.dtype, counts: tuple[int, ...], case: ScanCase) -> None:
    inputs, state = gated_delta_inputs(case, sum(counts), dtype), mamba2_state(case)
    states = state.repeat(2, 1, 1, 1, 1)
    expected = gated_delta_scan_reference(**inputs, state=states[0], rows=state_rows(counts))
    near(gated_delta_scan(**inputs, state=states[1], rows=state_rows(counts)), expected, 4)
    near(states[1], states[0], 4)
    unused = [1, 4, 5]
    assert torch.equal(states[1][unused], state[unused])


_SCANS: dict[str, Callable[..., Tensor]] = {
    "mamba1": mamba1_scan,
    "mamba2": mamba2_scan,
    "gated delta": gated_delta_scan,
    "gated delta by key": gated_delta_scan,
}


@pytest.mark.parametrize("scan", ["mamba1", "mamba2", "gated delta", "gated delta by key", "conv"])
def test_states_go_on(scan: str) -> None:
    """A prompt in pieces leaves what it leaves as a whole."""
    case, conv = ScanCase(by_key=scan == "gated delta by key"), ConvCase()

    def run(pieces: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        if scan == "conv":
            x, weights, _, _ = conv_inputs(conv, 150, torch.float32)
            state = torch.zeros(NUM_ROWS, conv.width - 1, conv.channels)
        elif scan == "mamba1":
            inputs, state = mamba1_inputs(ChannelsCase(), 150, torch.float32), mamba1_state(ChannelsCase()).zero_()
        elif scan == "mamba2":
            inputs, state = mamba2_inputs(case, 150, torch.float32), torch.zeros_like(mamba2_state(case))
        else:
            inputs, state = gated_delta_inputs(case, 150, torch.float32), torch.zeros_like(mamba2_state(case))
        outs, begin = [], 0
        for count in pieces:
            now = slice(begin, begin + count)
            begin += count
            if scan == "conv":
                outs.append(causal_conv1d(x[now], weights, state, state_rows((count,))))
                continue
            scanned = _SCANS[scan]
            whole = ("a", "d", "dt_bias", "dt_limit", "max_beta")
            some = {name: each if name in whole else each[now] for name, each in inputs.items()}
            outs.append(scanned(**some, state=state, rows=state_rows((count,))))
        return torch.cat(outs), state

    expected, state = run((150,))
    for pieces in ((1, 149), (64, 64, 22), (100, 1, 1, 48)):
        got, left = run(pieces)
        near(got, expected)
        near(left, state)


NORMS = list(product((0, 16), (False, True), (False, True), (False, True)))


@pytest.mark.parametrize(("dtype", "norm"), list(product(DTYPES, [None, *NORMS])))
def test_gated_norm(dtype: torch.dtype, norm: tuple[int, bool, bool, bool] | None) -> None:
    x, gate = torch.randn(2, 5, 64).to(dtype)
    weights = GatedNorm()
    if norm is not None:
        group_size, shared, first, is_sigmoid = norm
        size = (group_size or 64) if shared else 64
        weights = GatedNorm((1 + torch.randn(size) / 2).to(dtype), 1e-5, group_size, first, is_sigmoid)
    given = x.clone(), gate.clone()
    assert_near(gated_norm(x, gate, weights), gated_norm_reference(x, gate, weights))
    assert torch.equal(x, given[0])
    assert torch.equal(gate, given[1])


def test_what_does_not_fit_is_refused() -> None:
    rows = state_rows((2,))
    with pytest.raises(ValueError, match="query_start_loc"):
        StateRows(rows.rows, rows.rows, 1)
    with pytest.raises(ValueError, match="channels of 4"):
        causal_conv1d(torch.zeros(2, 8), ConvWeights(torch.zeros(8, 4)), torch.zeros(8, 4, 8), rows)
    case = ScanCase()
    checked: list[tuple[dict[str, Any], Callable[..., Tensor]]] = [
        (mamba2_inputs(case, 2, torch.float32), mamba2_scan),
        (gated_delta_inputs(case, 2, torch.float32), gated_delta_scan),
    ]
    for inputs, scan in checked:
        state = mamba2_state(case)
        with pytest.raises(ValueError, match="do not fit state"):
            scan(**inputs, state=state[:, 1:], rows=rows)
        with pytest.raises(ValueError, match="fp32"):
            scan(**inputs, state=state.bfloat16(), rows=rows)
    channels = mamba1_inputs(ChannelsCase(), 2, torch.float32)
    with pytest.raises(ValueError, match="do not fit state"):
        mamba1_scan(**channels, state=mamba1_state(ChannelsCase(48, 8)), rows=rows)
    with pytest.raises(ValueError, match="fp32"):
        mamba1_scan(**channels, state=mamba1_state(ChannelsCase()).bfloat16(), rows=rows)
    checked = [
        (mamba2_inputs(ScanCase(3, 2), 2, torch.float32), mamba2_scan),
        (gated_delta_inputs(ScanCase(3, 2), 2, torch.float32), gated_delta_scan),
    ]
    for inputs, scan in checked:
        with pytest.raises(ValueError, match="cannot share"):
            scan(**inputs, state=mamba2_state(ScanCase(3, 2)), rows=rows)
    with pytest.raises(ValueError, match="groups of 3"):
        gated_norm(torch.zeros(1, 8), torch.zeros(1, 8), GatedNorm(group_size=3))
    with pytest.raises(ValueError, match="weight"):
        gated_norm(torch.zeros(1, 8), torch.zeros(1, 8), GatedNorm(torch.zeros(3)))
