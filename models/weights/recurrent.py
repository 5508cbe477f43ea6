"""Where a checkpoint has the weights of mixers with a state."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from penstock.models.description.decoder import Norm
from penstock.models.description.names import Names
from penstock.models.description.recurrent import GatedDelta, KimiDelta, Mamba1, Mamba2, Recurrent, ShortConv
from penstock.models.weights.sources import LinearSource, NormSource, Source, linear, norm_of, prefixed


class RecurrentSources(NamedTuple):
    """The weights of any such mixer; None for those that it lacks."""

    projection: LinearSource
    conv: Source  # [channels, 1, width]
    out: LinearSource
    conv_bias: Source | None = None
    gates: LinearSource | None = None  # of the delta rule: to b and a, or f, z and b; of Mamba 1: to r, B and C
    gate_norms: tuple[NormSource, ...] = ()  # of r, B and C
    steps: LinearSource | None = None  # from r, or f, to the time steps; its bias is `dt_bias`
    opening: LinearSource | None = None  # from z to the gates of what was read
    a_log: Source | None = None
    dt_bias: Source | None = None
    skip: Source | None = None
    norm: NormSource | None = None


def recurrent_sources(mixer: Recurrent, hidden: int, names: Names, prefix: str) -> RecurrentSources:
    """Return where each weight is."""
    place = _Place(hidden, names, prefix)
    if isinstance(mixer, ShortConv):
        return _short_conv(mixer, place)
    if isinstance(mixer, Mamba1):
        return _mamba1(mixer, place)
    if isinstance(mixer, Mamba2):
        return _mamba2(mixer, place)
    return _kimi_delta(mixer, place) if isinstance(mixer, KimiDelta) else _gated_delta(mixer, place)


class _Place(NamedTuple):
    """A layer in a checkpoint."""

    hidden: int
    names: Names
    prefix: str

    def common(
        self,
        sizes: Sequence[int],
        channels: int,
        width: int,
        inner: int,
        *,
        has_bias: bool = False,
        conv_bias: bool = False,
        order: tuple[int, ...] | None = None,
    ) -> RecurrentSources:
        """Return what every mixer has: two projections, and a convolution of the first ones' outputs."""
        of_token = prefixed(self.prefix, self.names.recurrent_in)
        of_conv = prefixed(self.prefix, self.names.recurrent_conv)
        of_channels = (channels,) if len(of_conv) == 1 else sizes[: len(of_conv)]
        shapes = tuple((size, 1, width) for size in of_channels)
        return RecurrentSources(
            projection=linear(of_token, tuple(sizes), self.hidden, has_bias, order=order),
            conv=Source(tuple(f"{name}.weight" for name in of_conv), shapes),
            conv_bias=Source((f"{of_conv[0]}.bias",), ((channels,),)) if conv_bias else None,
            out=linear((self.prefix + self.names.recurrent_out,), (self.hidden,), inner, has_bias),
        )

    def numbers(self, name: str, *shape: int) -> Source:
        return Source((self.prefix + name,), (shape,))

    def gates(self, sizes: tuple[int, ...], inputs: int, order: tuple[int, ...] | None = None) -> LinearSource:
        return linear(prefixed(self.prefix, self.names.recurrent_gates), sizes, inputs, False, order=order)

    def widened(self, name: str, size: int, inputs: int) -> LinearSource:
        return linear((self.prefix + name,), (size,), inputs, False)

    def norm(self, eps: float | None, size: int) -> NormSource | None:
        return None if eps is None else norm_of(Norm(eps=eps), self.prefix + self.names.recurrent_norm, size)


def _short_conv(its: ShortConv, place: _Place) -> RecurrentSources:
    return place.common(
        (3 * its.size,), its.size, its.conv_width, its.size, has_bias=its.has_bias, conv_bias=its.has_bias
    )


def _mamba1(its: Mamba1, place: _Place) -> RecurrentSources:
    names, inner = place.names, its.inner
    common = place.common((2 * inner,), inner, its.conv_width, inner, has_bias=its.has_bias, conv_bias=its.conv_bias)
    return common._replace(
        gates=place.gates((its.num_gates,), inner),
        gate_norms=_gate_norms(its, prefixed(place.prefix, names.recurrent_gate_norms)),
        steps=place.widened(names.recurrent_steps, inner, its.dt_rank),
        a_log=place.numbers(names.a_log, inner, its.state_size),
        dt_bias=place.numbers(names.dt_bias, inner),
        skip=place.numbers(names.skip, inner),
    )


def _gate_norms(its: Mamba1, names: tuple[str, ...]) -> tuple[NormSource, ...]:
    if its.norm_eps is None:
        return ()
    norm = Norm(eps=its.norm_eps, has_weight=its.norms_have_weights)
    sizes = (its.dt_rank, its.state_size, its.state_size)
    found = (norm_of(norm, name, size) for name, size in zip(names, sizes, strict=True))
    return tuple(each for each in found if each is not None)


def _mamba2(its: Mamba2, place: _Place) -> RecurrentSources:
    common = place.common(
        *((its.num_projected,), its.conv_channels, its.conv_width, its.inner),
        has_bias=its.has_bias,
        conv_bias=its.conv_bias,
    )
    return common._replace(
        a_log=place.numbers(place.names.a_log, its.num_heads),
        dt_bias=place.numbers(place.names.dt_bias, its.num_heads),
        skip=place.numbers(place.names.skip, its.num_heads),
        norm=place.norm(its.norm_eps, its.inner),
    )


def _kimi_delta(its: KimiDelta, place: _Place) -> RecurrentSources:
    names, size = place.names, its.head_dim
    return place.common((its.inner,) * 3, 3 * its.inner, its.conv_width, its.inner)._replace(
        gates=place.gates((size, size, its.num_heads), place.hidden),
        steps=place.widened(names.recurrent_steps, its.inner, size),
        opening=place.widened(names.recurrent_opening, its.inner, size),
        a_log=place.numbers(names.a_log, 1, 1, its.num_heads, 1),
        dt_bias=place.numbers(names.dt_bias, its.inner),
        norm=place.norm(its.norm_eps, size),
    )


def _gated_delta(its: GatedDelta, place: _Place) -> RecurrentSources:
    sizes: tuple[int, ...] = (its.conv_channels, its.value_size)
    if len(place.names.recurrent_in) > len(sizes):
        sizes = (its.key_size, its.key_size, its.value_size, its.value_size)
    common = place.common(sizes, its.conv_channels, its.conv_width, its.value_size, order=_projection_order(its))
    heads = its.num_value_heads
    return common._replace(
        gates=place.gates((heads, heads), place.hidden, _gates_order(its)),
        a_log=place.numbers(place.names.a_log, heads),
        dt_bias=place.numbers(place.names.dt_bias, heads),
        norm=place.norm(its.norm_eps, its.value_dim),
    )


@cache
def _projection_order(mixer: GatedDelta) -> tuple[int, ...] | None:
    """Return the order that puts all of q before k, v and z, if each key head's parts are next to each other."""
    if not mixer.is_grouped:
        return None
    of_values = mixer.value_size // mixer.num_key_heads
    return _apart((mixer.key_dim, mixer.key_dim, of_values, of_values), mixer.num_key_heads)


@cache
def _gates_order(mixer: GatedDelta) -> tuple[int, ...] | None:
    if not mixer.is_grouped:
        return None
    return _apart((mixer.num_value_heads // mixer.num_key_heads,) * 2, mixer.num_key_heads)


def _apart(sizes: tuple[int, ...], num_groups: int) -> tuple[int, ...]:
    """Return the order that puts the first parts of all groups before the second ones; `sizes`: of a group's parts."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        group * sum(sizes) + start + i
        for start, size in zip(starts, sizes, strict=True)
        for group in range(num_groups)
        for i in range(size)
    )
