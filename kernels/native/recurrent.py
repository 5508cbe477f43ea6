"""The operations of layers that keep states, for a program (`operations/recurrent.h`)."""

from typing import NamedTuple

from torch import Tensor

from penstock.kernels.native.library import address_of
from penstock.kernels.native.operations import structs
from penstock.kernels.native.program.builder import ProgramBuilder, norm_struct
from penstock.kernels.norms import NormWeights
from penstock.kernels.scan.causal_conv1d import ConvWeights
from penstock.kernels.scan.gated_norm import GatedNorm

LONGEST_CONVOLUTION = 4  # as in scan/convolution.h
_FLOAT_MAX = 3.4028234663852886e38


class Part(NamedTuple):
    """Floats of each token: a slot, and where in it they begin."""

    slot: int
    first: int = 0


class Mamba2Shape(NamedTuple):
    """The shape of a scan."""

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int


class DeltaShape(NamedTuple):
    """The shape of a gated delta rule."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int


def convolve(
    builder: ProgramBuilder,
    weights: ConvWeights,
    state: int,
    source: Part,
    to: Part,
    input_gate: int | None = None,
    output_gate: int | None = None,
) -> None:
    """to = causal_conv1d(source), where both may be the same.

    Args:
        builder: of the program.
        weights: of the convolution.
        state: index of the rows' states, fp32 [R, K - 1, C].
        source: the inputs.
        to: where the outputs go.
        input_gate: where the inputs' gate begins in the slot of the source.
        output_gate: where the outputs' gate begins in the slot of the source.

    Raises:
        ValueError: if the convolution is longer than `LONGEST_CONVOLUTION`.
    """
    channels, width = weights.weight.shape
    if not 2 <= width <= LONGEST_CONVOLUTION:
        raise ValueError(f"the CPU kernels convolve 2 to {LONGEST_CONVOLUTION} inputs, not {width}")
    weight, bias = weights.weight.float().T.contiguous(), _floats(weights.bias)
    struct = structs.ConvolutionStruct(weight.data_ptr(), address_of(bias), channels, width, weights.has_silu)
    gates = (-1 if gate is None else gate for gate in (input_gate, output_gate))
    builder.append(structs.Convolving(struct, *source, *gates, *to, state), 0, weight, bias)


def scan_mamba1(
    builder: ProgramBuilder,
    state: int,
    source: Part,
    dts: int,
    gates: int,
    b: int,
    c: int,
    to: int,
    *,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
) -> None:
    """to = mamba1_scan(source, dts, b, c): `dts` is a slot, and the last two begin where they say in the slot `gates`.

    The other arguments are as in `mamba1_scan`; `state` is the index of the rows' states.
    """
    a, bias, skip = (each.float().contiguous() for each in (a, dt_bias, d))
    state_size, channels = a.shape
    struct = structs.Mamba1Struct(a.data_ptr(), bias.data_ptr(), skip.data_ptr(), channels, state_size)
    builder.append(structs.Mamba1Scanning(struct, *source, dts, gates, b, c, to, state), 0, a, bias, skip)


def scan_mamba2(
    builder: ProgramBuilder,
    shape: Mamba2Shape,
    state: int,
    source: int,
    x: int,
    b: int,
    c: int,
    dt: int,
    to: int,
    *,
    a: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
) -> None:
    """to = mamba2_scan(x, dt, b, c); the arguments say where each begins in the slot `source`.

    The other arguments are as in `mamba2_scan`; `state` is the index of the rows' states.
    """
    a, bias, skip = a.float().contiguous(), _floats(dt_bias), _floats(d)
    limits = (max(dt_limit[0], 0.0), min(dt_limit[1], _FLOAT_MAX))
    struct = structs.Mamba2Struct(a.data_ptr(), address_of(bias), address_of(skip), *limits, *shape)
    builder.append(structs.Mamba2Scanning(struct, source, x, b, c, dt, to, state), 0, a, bias, skip)


def scan_gated_delta(
    builder: ProgramBuilder,
    shape: DeltaShape,
    state: int,
    source: int,
    q: int,
    k: int,
    v: int,
    dt: Part,
    b: Part,
    to: int,
    *,
    a: Tensor,
    dt_bias: Tensor,
    max_beta: float = 1.0,
) -> None:
    """to = gated_delta_scan(q, k, v, dt, b): the first three are in the slot `source`.

    The other arguments are as in `gated_delta_scan`; `state` is the index of the rows' states.
    """
    a, bias = a.float().contiguous(), dt_bias.float().contiguous()
    struct = structs.GatedDeltaStruct(a.data_ptr(), bias.data_ptr(), *shape, max_beta, dt_bias.ndim == 2)
    builder.append(structs.DeltaScanning(struct, source, q, k, v, *dt, *b, to, state), 0, a, bias)


def norm_gated(builder: ProgramBuilder, weights: GatedNorm, x: int, gate: Part, size: int) -> None:
    """x = gated_norm(x, gate), for `size` floats."""
    group_size, kept = weights.group_size or size, list[object]()
    is_shared = weights.weight is not None and len(weights.weight) == group_size
    norm = None if weights.weight is None else NormWeights(weights.weight.float(), weights.eps)
    operation = structs.GatedNorm(
        *(norm_struct(norm, kept), x, *gate, size, group_size, 0 if is_shared else group_size),
        *(weights.norms_first, weights.is_sigmoid),
    )
    builder.append(operation, size, *kept)


def open_gates(builder: ProgramBuilder, x: int, gate: Part, size: int) -> None:
    """x *= sigmoid(gate), for `size` floats."""
    norm = norm_struct(None, [])
    builder.append(structs.GatedNorm(norm, x, *gate, size, size, is_sigmoid=True), size)


def _floats(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.float().contiguous()
