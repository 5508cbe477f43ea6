"""Operations of layers with states on the CPU's own kernels, against their plain references, and bit against bit."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.native.library import Library
from penstock.kernels.native.pool import NativePool
from penstock.kernels.native.program.builder import ProgramBuilder
from penstock.kernels.native.program.program import Program
from penstock.kernels.native.recurrent import (
    DeltaShape,
    Mamba2Shape,
    Part,
    convolve,
    norm_gated,
    scan_gated_delta,
    scan_mamba1,
    scan_mamba2,
)
from penstock.kernels.scan.causal_conv1d import ConvWeights, causal_conv1d_reference
from penstock.kernels.scan.gated_delta import gated_delta_scan_reference
from penstock.kernels.scan.gated_norm import GatedNorm, gated_norm_reference
from penstock.kernels.scan.mamba1 import mamba1_scan_reference
from penstock.kernels.scan.mamba2 import mamba2_scan_reference
from penstock.kernels.scan.rows import StateRows
from tests.kernels.native.native_library import load_library
from tests.kernels.pairs import every
from tests.kernels.scan_cases import (
    CHANNELS_CASES,
    CONV_CASES,
    DELTA_CASES,
    NUM_ROWS,
    RAGGED,
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
from tests.kernels.test_scan import NORMS, near

_OUT = ProgramBuilder.OUT
_WHOLE = ("a", "d", "dt_bias", "dt_limit", "max_beta")  # not of each token


@pytest.fixture(scope="module", params=[1, 2])
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Operation:
    """A program that copies what it is given to a slot, has operations there, and copies a slot to its results."""

    def __init__(self, library: Library, width: int, add: Callable[[ProgramBuilder, int, int], None]) -> None:
        """`add(builder, given, to)` adds the operations."""
        self._width, builder = width, ProgramBuilder(width)
        given, to = builder.slot(width), builder.slot(width)
        builder.norm(None, _OUT, given, width)
        builder.norm(None, _OUT, to, width)
        add(builder, given, to)
        builder.norm(None, to, _OUT, width)
        self._program: Program = builder.build(library, None)

    def __call__(self, parts: Sequence[Tensor], rows: StateRows, states: Sequence[Tensor], size: int) -> Tensor:
        """The first `size` numbers of each token's results."""
        joint = torch.cat([part.flatten(1) for part in parts], 1)
        given = torch.nn.functional.pad(joint, (0, self._width - joint.shape[1])).contiguous()
        ids = torch.zeros(len(given), dtype=torch.int32)
        lens = rows.query_start_loc.diff()
        pool = NativePool([], (), states)
        out = self._program.forward(ids, ids.long(), rows.query_start_loc, lens, [], [], pool, given, rows=rows.rows)
        return out[:, :size]


def mamba1_operation(library: Library, case: ChannelsCase, inputs: dict[str, Any]) -> Callable[..., Tensor]:
    channels, size = case
    whole = {name: inputs[name] for name in ("a", "d", "dt_bias")}

    def add(builder: ProgramBuilder, given: int, to: int) -> None:
        dts = builder.slot(channels)
        builder.norm(None, given, dts, channels)
        scan_mamba1(builder, 0, Part(given, channels), dts, given, 2 * channels, 2 * channels + size, to, **whole)

    operation = Operation(library, 2 * channels + 2 * size, add)

    def run(x: Tensor, b: Tensor, c: Tensor, dt: Tensor, state: Tensor, rows: StateRows, **_: Any) -> Tensor:
        return operation([dt, x, b, c], rows, [state], channels)

    return run


def mamba2_operation(library: Library, case: ScanCase, inputs: dict[str, Any]) -> Callable[..., Tensor]:
    x, b, c, dt = (inputs[name].flatten(1).shape[1] for name in ("x", "b", "c", "dt"))
    shape = Mamba2Shape(case.heads, case.groups, case.value_dim, case.key_dim)
    whole = {name: inputs[name] for name in ("a", "d", "dt_bias", "dt_limit")}

    def add(builder: ProgramBuilder, given: int, to: int) -> None:
        scan_mamba2(builder, shape, 0, given, 0, x, x + b, x + b + c, to, **whole)

    operation = Operation(library, x + b + c + dt, add)

    def run(x: Tensor, b: Tensor, c: Tensor, dt: Tensor, state: Tensor, rows: StateRows, **_: Any) -> Tensor:
        return operation([x, b, c, dt], rows, [state], case.heads * case.value_dim).view(x.shape)

    return run


def delta_operation(library: Library, case: ScanCase, inputs: dict[str, Any]) -> Callable[..., Tensor]:
    q, v, dt, b = (inputs[name].flatten(1).shape[1] for name in ("q", "v", "dt", "b"))
    shape = DeltaShape(case.heads, case.groups, case.key_dim, case.value_dim)
    end = 2 * q + v

    def add(builder: ProgramBuilder, given: int, to: int) -> None:
        scan_gated_delta(
            *(builder, shape, 0, given, 0, q, 2 * q, Part(given, end), Part(given, end + dt), to),
            a=inputs["a"],
            dt_bias=inputs["dt_bias"],
            max_beta=inputs["max_beta"],
        )

    operation = Operation(library, end + dt + b, add)

    def run(q: Tensor, k: Tensor, v: Tensor, dt: Tensor, b: Tensor, state: Tensor, rows: StateRows, **_: Any) -> Tensor:
        return operation([q, k, v, dt, b], rows, [state], case.heads * case.value_dim).view(v.shape)

    return run


SCANS = {
    "mamba2": (mamba2_inputs, mamba2_operation, mamba2_scan_reference),
    "gated delta": (gated_delta_inputs, delta_operation, gated_delta_scan_reference),
}
# Wide, narrow and odd heads, as vectors see them.
NATIVE_CASES = (*DELTA_CASES, ScanCase(2, 1, 5, 7), ScanCase(2, 2, 40, 21), ScanCase(1, 1, 144, 33))


@pytest.mark.parametrize(("scan", "counts", "case"), every(tuple(SCANS), RAGGED, NATIVE_CASES))
def test_scans(library: Library, scan: str, counts: tuple[int, ...], case: ScanCase) -> None:
    make, operation, reference = SCANS[scan]
    inputs, state = make(case, sum(counts), torch.float32), mamba2_state(case)
    states, rows = state.repeat(2, 1, 1, 1, 1), state_rows(counts)
    expected = reference(**inputs, state=states[0], rows=rows)  # type: ignore[operator]
    near(operation(library, case, inputs)(**inputs, state=states[1], rows=rows), expected, 4)
    near(states[1], states[0], 4)
    unused = [1, 4, 5]
    assert torch.equal(states[1][unused], state[unused])


@pytest.mark.parametrize(("counts", "case"), every(RAGGED, CHANNELS_CASES))
def test_scans_of_channels(library: Library, counts: tuple[int, ...], case: ChannelsCase) -> None:
    inputs, state = mamba1_inputs(case, sum(counts), torch.float32), mamba1_state(case)
    states, rows = state.repeat(2, 1, 1, 1), state_rows(counts)
    expected = mamba1_scan_reference(**inputs, state=states[0], rows=rows)
    near(mamba1_operation(library, case, inputs)(**inputs, state=states[1], rows=rows), expected, 4)
    near(states[1], states[0], 4)
    unused = [1, 4, 5]
    assert torch.equal(states[1][unused], state[unused])


def cut(inputs: dict[str, Any], now: slice) -> dict[str, Any]:
    return {name: each if name in _WHOLE else each[now] for name, each in inputs.items()}


@pytest.mark.parametrize(
    "case",
    [
        ScanCase(2, 1, 64, 128),
        ScanCase(2, 1, 128, 128),
        ScanCase(2, 1, 128, 128, by_key=True),
        ScanCase(3, 3, 40, 21, by_key=True),
    ],
)
@pytest.mark.parametrize("scan", SCANS)
def test_bits_do_not_depend_on_the_batch(library: Library, scan: str, case: ScanCase) -> None:
    """A row alone and in pieces has the bits that it has in one piece beside others."""
    make, operation, _ = SCANS[scan]
    inputs = make(case, 150 + 33, torch.float32)
    check_bits(operation(library, case, inputs), inputs, mamba2_state(case))


@pytest.mark.parametrize("case", CHANNELS_CASES)
def test_bits_of_channels_do_not_depend_on_the_batch(library: Library, case: ChannelsCase) -> None:
    inputs = mamba1_inputs(case, 150 + 33, torch.float32)
    check_bits(mamba1_operation(library, case, inputs), inputs, mamba1_state(case))


def check_bits(run: Callable[..., Tensor], inputs: dict[str, Any], state: Tensor) -> None:
    """For rows of 150 and of 33 tokens."""
    together = state.clone()
    expected = run(**inputs, state=together, rows=state_rows((150, 33)))
    for pieces in ((150,), (1, 149), (64, 64, 22), (100, 1, 1, 48)):
        its, begin = state.clone(), 0
        for count in pieces:
            now = slice(begin, begin + count)
            got = run(**cut(inputs, now), state=its, rows=state_rows((count,)))
            assert torch.equal(got, expected[now])
            begin += count
        first = int(state_rows((1,)).rows[0])
        assert torch.equal(its[first], together[first])


@pytest.mark.parametrize(("counts", "case"), every(RAGGED, (*CONV_CASES, ConvCase(300, 3), ConvCase(7, 4))))
def test_convolutions(library: Library, counts: tuple[int, ...], case: ConvCase) -> None:
    x, weights, before, after = conv_inputs(case, sum(counts), torch.float32)
    states = torch.randn(NUM_ROWS, case.width - 1, case.channels).repeat(2, 1, 1, 1)
    expected = causal_conv1d_reference(x, weights, states[0], state_rows(counts), before, after)
    gates = [gate for gate in (before, after) if gate is not None]
    at = [case.channels * (1 + i) for i in range(len(gates))]
    for in_place in (False, True):
        its = states[1].clone()

        def add(builder: ProgramBuilder, given: int, to: int, in_place: bool = in_place) -> None:
            convolve(builder, weights, 0, Part(given), Part(given if in_place else to), *at)
            if in_place:
                builder.norm(None, given, to, case.channels)

        operation = Operation(library, case.channels * (1 + len(gates)), add)
        near(operation([x, *gates], state_rows(counts), [its], case.channels), expected)
        assert torch.equal(its, states[0])


@pytest.mark.parametrize("norm", [None, *NORMS])
def test_gated_norms(library: Library, norm: tuple[int, bool, bool, bool] | None) -> None:
    x, gate = torch.randn(2, 5, 64)
    weights = GatedNorm()
    if norm is not None:
        group_size, shared, first, is_sigmoid = norm
        weights = GatedNorm(
            1 + torch.randn((group_size or 64) if shared else 64) / 2, 1e-5, group_size, first, is_sigmoid
        )

    def add(builder: ProgramBuilder, given: int, to: int) -> None:
        norm_gated(builder, weights, to, Part(given, 64), 64)

    rows = state_rows((5,))
    near(Operation(library, 128, add)([x, gate], rows, [], 64), gated_norm_reference(x, gate, weights))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="not 5"):
        convolve(ProgramBuilder(8), ConvWeights(torch.zeros(8, 5)), 0, Part(0), Part(0))
    with pytest.raises(ValueError, match="fp32"):
        NativePool([], (), [torch.zeros(2, 3, dtype=torch.bfloat16)])
    with pytest.raises(ValueError, match="contiguous"):
        NativePool([], (), [torch.zeros(2, 3, 4).transpose(1, 2)])
