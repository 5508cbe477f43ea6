"""Finds, before any process starts, what cannot be split, and why."""

import math
from collections.abc import Iterator

from penstock.config.options import ConfigError
from penstock.config.ranks import Place
from penstock.models.description.decoder import Attention, Decoder, DenseMLP, Experts, LatentAttention, Layer
from penstock.models.formats.format import LEAST_INPUT_GROUP, Inputs
from penstock.models.shards.ranges import logit_width
from penstock.models.shards.units import Units, stored_format, units_of

_MOST_SIZES = 128


def refuse_split(model: Decoder, place: Place) -> None:
    """Refuse an impossible split.

    Raises:
        ConfigError: one sentence with limit and value.
    """
    num_layers = len(model.layers)
    if model.state_layers:
        raise ConfigError(
            f"{model.architecture} has layers that keep a state, which cannot be split over several workers: leave out "
            "--tensor-parallel-size and --pipeline-parallel-size"
        )
    if any(layer.mixer is None or layer.mlp is None for layer in model.layers):
        raise ConfigError(
            f"{model.architecture} has layers that are attention or an MLP alone, which cannot be split over several "
            "workers: leave out --tensor-parallel-size and --pipeline-parallel-size"
        )
    if place.num_stages > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {place.num_stages}: {model.architecture} has only {num_layers} layers"
        )
    if (why := _why_not(model, place.num_tensor)) is not None:
        sizes = [size for size in range(2, _MOST_SIZES + 1) if _why_not(model, size) is None]
        can = f"; it can be split over {_listed(sizes)}" if sizes else ""
        raise ConfigError(f"--tensor-parallel-size {place.num_tensor}: {model.architecture} {why}{can}")


def _why_not(model: Decoder, num_tensor: int) -> str | None:
    """Return why the model cannot be split over this many ranks; None if it can."""
    if num_tensor == 1:
        return None
    if (num_tensor - 1) * logit_width(model.vocab_size, num_tensor) >= model.vocab_size:
        return f"has a vocabulary of only {model.vocab_size}"
    known: set[tuple[Layer, Units]] = set()
    for number, layer in enumerate(model.layers):
        units = units_of(model, number)
        if (layer, units) not in known and (why := _why_not_layer(layer, units, num_tensor)) is not None:
            return why
        known.add((layer, units))
    return _why_not_ordered(model) or _why_not_rounded(model, num_tensor)


def _why_not_layer(layer: Layer, units: Units, num_tensor: int) -> str | None:
    mixer = layer.attention
    assert mixer is not None
    if mixer.num_heads % num_tensor:
        return f"has {mixer.num_heads} attention heads, which cannot be split evenly"
    if isinstance(mixer, Attention) and mixer.num_kv_heads % num_tensor and num_tensor % mixer.num_kv_heads:
        return f"has {mixer.num_kv_heads} KV heads, of which ranks would have unequal numbers"
    for what, size, unit in _inner_sizes(layer, units):
        if -(-size // unit) < num_tensor:
            by = "" if unit == 1 else f", quantized in groups of {unit}"
            return f"has {what} of {size} numbers{by}: too few for a part of each rank"
    return None


def _inner_sizes(layer: Layer, units: Units) -> Iterator[tuple[str, int, int]]:
    mlps = [layer.mlp] if layer.beside_mlp is None else [layer.mlp, layer.beside_mlp.experts]
    for mlp in mlps:
        if mlp is None:
            continue
        if isinstance(mlp, DenseMLP):
            yield "MLPs", mlp.size, units.mlp
            continue
        if mlp.spread is None:
            yield "experts", mlp.size, units.experts
        if mlp.shared is not None:
            yield "shared experts", mlp.shared.size, units.shared


def _why_not_ordered(model: Decoder) -> str | None:
    """Check for inputs grouped by importance, which cannot be split: a range of them has some of every group."""
    names = model.names
    for number, layer in enumerate(model.layers):
        prefix = names.layer.format(number)
        downs = [f"{names.o}.weight"]
        if not isinstance(layer.mlp, Experts):
            downs.append(f"{names.down}.weight")
        elif layer.mlp.spread is None:
            downs.append(names.first_down)
        for name in downs:
            if getattr(stored_format(model, prefix + name), "has_order", False):
                return (
                    "is quantized with inputs in the order of their importance (desc_act, actorder), which cannot be "
                    "split; serve a version without"
                )
    return None


def _why_not_rounded(model: Decoder, num_tensor: int) -> str | None:
    """Check for inputs rounded in groups: a group is divided if a rank's heads begin inside it."""
    for number, layer in enumerate(model.layers):
        mixer = layer.attention
        assert mixer is not None
        format = stored_format(model, f"{model.names.layer.format(number)}{model.names.o}.weight")
        inputs: Inputs | None = getattr(format, "inputs", None)
        if inputs is None or inputs.group is None:
            continue
        width = mixer.v_dim if isinstance(mixer, LatentAttention) else mixer.kv.value_dim
        in_part = mixer.num_heads // num_tensor * width
        if (left := math.gcd(inputs.group, in_part)) < LEAST_INPUT_GROUP:
            return (
                f"rounds the inputs of attention's last product in groups of {inputs.group}; a rank would have "
                f"{in_part} of them, in groups of {left}, and {LEAST_INPUT_GROUP} is the least"
            )
    return None


def _listed(sizes: list[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
