"""Mixers that keep a state for each row, computed by the scan kernels."""

from typing import NamedTuple

from torch import Tensor

from penstock.gpu_worker.models.blocks.attention import AttentionBlock
from penstock.gpu_worker.models.blocks.step import Step
from penstock.gpu_worker.models.linear import Linear
from penstock.kernels.norms import NormWeights, norm
from penstock.kernels.scan.causal_conv1d import ConvWeights, causal_conv1d
from penstock.kernels.scan.gated_delta import gated_delta_scan
from penstock.kernels.scan.gated_norm import GatedNorm, gated_norm
from penstock.kernels.scan.mamba1 import mamba1_scan
from penstock.kernels.scan.mamba2 import mamba2_scan
from penstock.models.description.decoder import SideBySide
from penstock.models.description.recurrent import GatedDelta, KimiDelta, Mamba1, Mamba2, ShortConv


class Mamba1Block(NamedTuple):
    """See `Mamba1`, the description."""

    mixer: Mamba1
    projection: Linear  # [2 * inner, H]: x, then z
    conv: ConvWeights  # over x
    gates: Linear  # [num_gates, inner]: r, B, C
    gate_norms: tuple[NormWeights, ...]  # of r, B and C; none, or three
    steps: Linear  # [inner, dt_rank]
    a: Tensor  # fp32[state_size, inner]
    dt_bias: Tensor  # fp32[inner]
    skip: Tensor  # fp32[inner]
    out: Linear  # [H, inner]

    def __call__(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, H] -> [T, H]"""
        its, (conv_state, scan_state) = self.mixer, step.states[layer]
        assert step.state_rows is not None
        values, z = self.projection(x, step.inputs).chunk(2, dim=1)
        values = causal_conv1d(values, self.conv, conv_state, step.state_rows)
        gates = self.gates(values, step.inputs).split((its.dt_rank, its.state_size, its.state_size), dim=1)
        if self.gate_norms:
            gates = tuple(
                norm(gate.contiguous(), weights) for gate, weights in zip(gates, self.gate_norms, strict=True)
            )
        of_steps, b, c = gates
        dt = self.steps(of_steps.contiguous(), step.inputs)
        y = mamba1_scan(values, dt, b, c, self.a, scan_state, step.state_rows, d=self.skip, dt_bias=self.dt_bias)
        return self.out(gated_norm(y, z, GatedNorm()), step.inputs)


class Mamba2Block(NamedTuple):
    """See `Mamba2`, the description."""

    mixer: Mamba2
    projection: Linear  # [num_projected, H]: z, then x, B and C, then dt
    conv: ConvWeights  # over x, B and C
    a: Tensor  # fp32[heads]
    dt_bias: Tensor  # fp32[heads]
    skip: Tensor  # fp32[heads]
    norm: GatedNorm
    out: Linear  # [H, inner]
    in_scales: Tensor | None  # [num_projected]

    def __call__(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, H] -> [T, H]"""
        its, (conv_state, scan_state) = self.mixer, step.states[layer]
        assert step.state_rows is not None
        projected = self.projection(x, step.inputs)
        if self.in_scales is not None:
            projected = projected * self.in_scales
        z, mixed, dt = projected.split((its.inner, its.conv_channels, its.num_heads), dim=1)
        mixed = causal_conv1d(mixed, self.conv, conv_state, step.state_rows)
        of_groups = its.num_groups * its.state_size
        values, b, c = mixed.split((its.inner, of_groups, of_groups), dim=1)
        y = mamba2_scan(
            values.unflatten(1, (its.num_heads, its.head_dim)),
            dt,
            b.unflatten(1, (its.num_groups, its.state_size)),
            c.unflatten(1, (its.num_groups, its.state_size)),
            self.a,
            scan_state,
            step.state_rows,
            d=self.skip,
            dt_bias=self.dt_bias,
            dt_limit=(its.min_dt, float("inf") if its.max_dt is None else its.max_dt),
        )
        return self.out(gated_norm(y.flatten(1), z, self.norm), step.inputs)


class GatedDeltaBlock(NamedTuple):
    """See `GatedDelta`, the description."""

    mixer: GatedDelta
    projection: Linear  # [conv_channels + value_size, H]: q, k and v, then z
    gates: Linear  # [2 * value heads, H]: b, then a
    conv: ConvWeights  # over q, k and v
    a: Tensor  # fp32[value heads]
    dt_bias: Tensor  # fp32[value heads]
    norm: GatedNorm
    out: Linear  # [H, value_size]

    def __call__(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, H] -> [T, H]"""
        its, (conv_state, delta_state) = self.mixer, step.states[layer]
        assert step.state_rows is not None
        mixed, z = self.projection(x, step.inputs).split((its.conv_channels, its.value_size), dim=1)
        mixed = causal_conv1d(mixed, self.conv, conv_state, step.state_rows)
        q, k, v = mixed.split((its.key_size, its.key_size, its.value_size), dim=1)
        b, dt = self.gates(x, step.inputs).chunk(2, dim=1)
        y = gated_delta_scan(
            q.unflatten(1, (its.num_key_heads, its.key_dim)),
            k.unflatten(1, (its.num_key_heads, its.key_dim)),
            v.unflatten(1, (its.num_value_heads, its.value_dim)),
            dt,
            b,
            self.a,
            self.dt_bias,
            delta_state,
            step.state_rows,
            its.max_beta,
        )
        return self.out(gated_norm(y.flatten(1), z, self.norm), step.inputs)


class KimiDeltaBlock(NamedTuple):
    """See `KimiDelta`, the description."""

    mixer: KimiDelta
    projection: Linear  # [3 * inner, H]: q, k and v
    gates: Linear  # [num_gates, H]: f, z, b
    conv: ConvWeights  # over q, k and v
    steps: Linear  # [inner, head_dim]
    opening: Linear  # [inner, head_dim]
    a: Tensor  # fp32[heads]
    dt_bias: Tensor  # fp32[heads, head_dim]
    norm: GatedNorm
    out: Linear  # [H, inner]

    def __call__(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, H] -> [T, H]"""
        its, (conv_state, delta_state) = self.mixer, step.states[layer]
        assert step.state_rows is not None
        mixed = causal_conv1d(self.projection(x, step.inputs), self.conv, conv_state, step.state_rows)
        q, k, v = (each.unflatten(1, (its.num_heads, its.head_dim)) for each in mixed.chunk(3, dim=1))
        f, z, b = self.gates(x, step.inputs).split((its.head_dim, its.head_dim, its.num_heads), dim=1)
        dt = self.steps(f.contiguous(), step.inputs).unflatten(1, (its.num_heads, its.head_dim))
        y = gated_delta_scan(q, k, v, dt, b, self.a, self.dt_bias, delta_state, step.state_rows)
        gate = self.opening(z.contiguous(), step.inputs)
        return self.out(gated_norm(y.flatten(1), gate, self.norm), step.inputs)


class ShortConvBlock(NamedTuple):
    """See `ShortConv`, the description."""

    mixer: ShortConv
    projection: Linear  # [3 * size, H]: B, C, x
    conv: ConvWeights
    out: Linear  # [H, size]

    def __call__(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, H] -> [T, H]"""
        (state,) = step.states[layer]
        assert step.state_rows is not None
        b, c, values = self.projection(x, step.inputs).chunk(3, dim=1)
        mixed = causal_conv1d(values, self.conv, state, step.state_rows, input_gate=b, output_gate=c)
        return self.out(mixed, step.inputs)


RecurrentBlock = Mamba1Block | Mamba2Block | GatedDeltaBlock | KimiDeltaBlock | ShortConvBlock


class SideBySideBlock(NamedTuple):
    """See `SideBySide`, the description."""

    mixer: SideBySide
    attention: AttentionBlock
    recurrent: RecurrentBlock

    def __call__(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, H] -> [T, H]"""
        attended = self.attention(x, step, layer).mul_(self.mixer.attention_scale)
        return attended.add_(self.recurrent(x, step, layer), alpha=self.mixer.recurrent_scale)
