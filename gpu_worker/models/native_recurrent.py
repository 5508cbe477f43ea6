"""Mixers with a state for each row, as operations of a program for the native CPU kernels."""

from collections.abc import Callable
from functools import cached_property

from penstock.gpu_worker.models.blocks.recurrent import (
    GatedDeltaBlock,
    KimiDeltaBlock,
    Mamba1Block,
    Mamba2Block,
    RecurrentBlock,
    ShortConvBlock,
)
from penstock.gpu_worker.models.linear import Linear
from penstock.kernels.native.program.builder import ProgramBuilder
from penstock.kernels.native.recurrent import (
    LONGEST_CONVOLUTION,
    DeltaShape,
    Mamba2Shape,
    Part,
    convolve,
    norm_gated,
    scan_gated_delta,
    scan_mamba1,
    scan_mamba2,
)
from penstock.kernels.scan.gated_norm import GatedNorm
from penstock.models.description.decoder import Decoder
from penstock.models.description.recurrent import GatedDelta, KimiDelta, Mamba1, Mamba2, Recurrent, ShortConv

Project = Callable[[Linear, int, int], None]
"""(weights, x, to): writes to = weights x."""


def lacking(mixer: Recurrent) -> str | None:
    """The first part that has no native operation; None if all parts have one."""
    if not 2 <= mixer.conv_width <= LONGEST_CONVOLUTION:
        return f"convolutions of {mixer.conv_width} inputs"
    return None


class RecurrentWriter:
    """Writes the operations of each layer with a state, without its last product."""

    def __init__(self, config: Decoder, builder: ProgramBuilder, project: Project) -> None:
        self._builder, self._project = builder, project
        self._mixers = [its for layer in config.layers if (its := layer.recurrent) is not None]
        self._first_states: dict[int, int] = {}  # by layer: the number of its first state tensor
        count = 0
        for layer, shape in config.state_layers.items():
            self._first_states[layer] = count
            count += len(shape)

    @cached_property
    def made(self) -> int:
        """The slot with the input of a mixer's last product."""
        return self._builder.slot(max(map(_made_size, self._mixers)))

    def write(self, layer: int, block: RecurrentBlock, x: int) -> None:
        """made = block(x) without its last product"""
        state = self._first_states[layer]
        if isinstance(block, Mamba1Block):
            self._mamba1(state, block, x)
        elif isinstance(block, Mamba2Block):
            self._mamba2(state, block, x)
        elif isinstance(block, GatedDeltaBlock):
            self._gated_delta(state, block, x)
        elif isinstance(block, KimiDeltaBlock):
            self._kimi_delta(state, block, x)
        else:
            self._short_conv(state, block, x)

    def _mamba1(self, state: int, block: Mamba1Block, x: int) -> None:
        its, builder, projected, gates = block.mixer, self._builder, self._projected, self._gates
        self._project(block.projection, x, projected)
        convolve(builder, block.conv, state, Part(projected), Part(projected))
        self._project(block.gates, projected, gates)
        b = its.dt_rank
        c = b + its.state_size
        sizes = (its.dt_rank, its.state_size, its.state_size)
        for first, size, norm in zip((0, b, c), sizes, block.gate_norms, strict=False):
            builder.norm(norm, gates, gates, size, begin=first, first=first)
        self._project(block.steps, gates, self._steps)
        scan_mamba1(
            *(builder, state + 1, Part(projected), self._steps, gates, b, c, self.made),
            a=block.a,
            d=block.skip,
            dt_bias=block.dt_bias,
        )
        norm_gated(builder, GatedNorm(), self.made, Part(projected, its.inner), its.inner)

    def _mamba2(self, state: int, block: Mamba2Block, x: int) -> None:
        its, builder, projected = block.mixer, self._builder, self._projected
        self._project(block.projection, x, projected)
        begin, groups = 0, its.num_groups * its.state_size
        for size, by in zip((its.inner, its.inner, groups, groups, its.num_heads), its.in_scales or (), strict=False):
            builder.scale(projected, size, by, begin=begin)
            begin += size
        mixed = Part(projected, its.inner)  # after z
        convolve(builder, block.conv, state, mixed, mixed)
        b = 2 * its.inner
        c = b + its.num_groups * its.state_size
        scan_mamba2(
            *(builder, Mamba2Shape(its.num_heads, its.num_groups, its.head_dim, its.state_size), state + 1),
            *(projected, its.inner, b, c, its.inner + its.conv_channels, self.made),
            a=block.a,
            d=block.skip,
            dt_bias=block.dt_bias,
            dt_limit=(its.min_dt, float("inf") if its.max_dt is None else its.max_dt),
        )
        norm_gated(builder, block.norm, self.made, Part(projected), its.inner)

    def _gated_delta(self, state: int, block: GatedDeltaBlock, x: int) -> None:
        its, builder, projected = block.mixer, self._builder, self._projected
        self._project(block.projection, x, projected)
        self._project(block.gates, x, self._gates)
        convolve(builder, block.conv, state, Part(projected), Part(projected))
        shape = DeltaShape(its.num_value_heads, its.num_key_heads, its.key_dim, its.value_dim)
        scan_gated_delta(
            *(builder, shape, state + 1, projected, 0, its.key_size, 2 * its.key_size),
            *(Part(self._gates, its.num_value_heads), Part(self._gates), self.made),
            a=block.a,
            dt_bias=block.dt_bias,
            max_beta=its.max_beta,
        )
        norm_gated(builder, block.norm, self.made, Part(projected, its.conv_channels), its.value_size)

    def _kimi_delta(self, state: int, block: KimiDeltaBlock, x: int) -> None:
        its, builder, projected, gates = block.mixer, self._builder, self._projected, self._gates
        self._project(block.projection, x, projected)
        self._project(block.gates, x, gates)
        convolve(builder, block.conv, state, Part(projected), Part(projected))
        self._project(block.steps, gates, self._steps)
        size = its.head_dim
        scan_gated_delta(
            *(builder, DeltaShape(its.num_heads, its.num_heads, size, size), state + 1),
            *(projected, 0, its.inner, 2 * its.inner),
            *(Part(self._steps), Part(gates, 2 * size), self.made),
            a=block.a,
            dt_bias=block.dt_bias,
        )
        builder.norm(None, gates, gates, size, begin=size)  # f has been used
        self._project(block.opening, gates, self._steps)
        norm_gated(builder, block.norm, self.made, Part(self._steps), its.inner)

    def _short_conv(self, state: int, block: ShortConvBlock, x: int) -> None:
        size = block.mixer.size
        self._project(block.projection, x, self._projected)
        source, to = Part(self._projected, 2 * size), Part(self.made)
        convolve(self._builder, block.conv, state, source, to, input_gate=0, output_gate=size)

    @cached_property
    def _projected(self) -> int:
        return self._builder.slot(max(map(_projected_size, self._mixers)))

    @cached_property
    def _gates(self) -> int:
        return self._builder.slot(max(map(_num_gates, self._mixers)))

    @cached_property
    def _steps(self) -> int:
        return self._builder.slot(max(its.inner for its in self._mixers if isinstance(its, Mamba1 | KimiDelta)))


def _num_gates(mixer: Recurrent) -> int:
    if isinstance(mixer, Mamba1 | KimiDelta):
        return mixer.num_gates
    return 2 * mixer.num_value_heads if isinstance(mixer, GatedDelta) else 0


def _projected_size(mixer: Recurrent) -> int:
    if isinstance(mixer, Mamba1 | KimiDelta):
        return (2 if isinstance(mixer, Mamba1) else 3) * mixer.inner
    if isinstance(mixer, Mamba2):
        return mixer.num_projected
    return 3 * mixer.size if isinstance(mixer, ShortConv) else mixer.conv_channels + mixer.value_size


def _made_size(mixer: Recurrent) -> int:
    if isinstance(mixer, Mamba1 | Mamba2 | KimiDelta):
        return mixer.inner
    return mixer.size if isinstance(mixer, ShortConv) else mixer.value_size
