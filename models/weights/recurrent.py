"""Where a checkpoint has the weights of mixers with a state."""

from functools import cache
from typing import NamedTuple

from penstock.models.description.decoder import Norm
from penstock.models.description.names import Names
from penstock.models.description.recurrent import GatedDelta, Mamba1, Mamba2, Recurrent, ShortConv
from penstock.models.weights.sources import LinearSource, NormSource, Source, linear, norm_of, prefixed


class RecurrentSources(NamedTuple):
    """The weights of any such mixer; None for those that it lacks."""

    projection: LinearSource
    gates: LinearSource | None  # of the delta rule: to b, then a; of Mamba 1: to r, B and C
    gate_norms: tuple[NormSource, ...]  # of r, B and C
    steps: LinearSource | None  # from r to the time steps; its bias is `dt_bias`
    conv: Source  # [channels, 1, width]
    conv_bias: Source | None
    a_log: Source | None
    dt_bias: Source | None
    skip: Source | None
    norm: NormSource | None
    out: LinearSource


def recurrent_sources(mixer: Recurrent, hidden: int, names: Names, prefix: str) -> RecurrentSources:
    """Return where each weight is."""
    conv_names, out = prefixed(prefix, names.recurrent_conv), (prefix + names.recurrent_out,)
    of_token, of_gates = prefixed(prefix, names.recurrent_in), prefixed(prefix, names.recurrent_gates)
    sizes: tuple[int, ...]
    if isinstance(mixer, ShortConv):
        has_bias, channels, sizes, inner = mixer.has_bias, mixer.size, (3 * mixer.size,), mixer.size
        conv_bias, norm, num_heads, order = has_bias, None, 0, None
    elif isinstance(mixer, Mamba1):
        has_bias, channels, sizes, inner = mixer.has_bias, mixer.inner, (2 * mixer.inner,), mixer.inner
        conv_bias, norm, num_heads, order = mixer.conv_bias, None, inner, None
    elif isinstance(mixer, Mamba2):
        has_bias, channels, sizes, inner = mixer.has_bias, mixer.conv_channels, (mixer.num_projected,), mixer.inner
        eps = mixer.norm_eps
        norm = None if eps is None else norm_of(Norm(eps=eps), prefix + names.recurrent_norm, inner)
        conv_bias, num_heads, order = mixer.conv_bias, mixer.num_heads, None
    else:
        has_bias, channels, inner = False, mixer.conv_channels, mixer.value_size
        of_parts = (mixer.key_size, mixer.key_size, inner)
        sizes = (channels, inner) if len(of_token) < 4 else (*of_parts, inner)
        norm = norm_of(Norm(eps=mixer.norm_eps), prefix + names.recurrent_norm, mixer.value_dim)
        conv_bias, num_heads, order = False, mixer.num_value_heads, _projection_order(mixer)

    of_convs = (channels,) if len(conv_names) == 1 else sizes[: len(conv_names)]

    def of_heads(name: str, *more: int) -> Source | None:
        return Source((prefix + name,), ((num_heads, *more),)) if num_heads else None

    gates, gate_norms, steps, decays = None, tuple[NormSource, ...](), None, tuple[int, ...]()
    if isinstance(mixer, Mamba1):
        gates = linear(of_gates, (mixer.num_gates,), inner, False)
        gate_norms = _gate_norms(mixer, prefixed(prefix, names.recurrent_gate_norms))
        steps = linear((prefix + names.recurrent_steps,), (inner,), mixer.dt_rank, False)
        decays = (mixer.state_size,)
    if isinstance(mixer, GatedDelta):
        gates = linear(of_gates, (num_heads, num_heads), hidden, False, order=_gates_order(mixer))
    return RecurrentSources(
        projection=linear(of_token, sizes, hidden, has_bias, order=order),
        gates=gates,
        gate_norms=gate_norms,
        steps=steps,
        conv=Source(
            tuple(f"{name}.weight" for name in conv_names), tuple((size, 1, mixer.conv_width) for size in of_convs)
        ),
        conv_bias=Source((f"{conv_names[0]}.bias",), ((channels,),)) if conv_bias else None,
        a_log=of_heads(names.a_log, *decays),
        dt_bias=of_heads(names.dt_bias),
        skip=of_heads(names.skip) if isinstance(mixer, Mamba1 | Mamba2) else None,
        norm=norm,
        out=linear(out, (hidden,), inner, has_bias),
    )


def _gate_norms(mixer: Mamba1, names: tuple[str, ...]) -> tuple[NormSource, ...]:
    if mixer.norm_eps is None:
        return ()
    norm = Norm(eps=mixer.norm_eps, has_weight=mixer.norms_have_weights)
    sizes = (mixer.dt_rank, mixer.state_size, mixer.state_size)
    found = (norm_of(norm, name, size) for name, size in zip(names, sizes, strict=True))
    return tuple(each for each in found if each is not None)


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
