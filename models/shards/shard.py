"""Turns the description of a model into that of a rank's part."""

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.config.ranks import Place
from penstock.models.description.decoder import (
    Attention,
    BesideMLP,
    Decoder,
    DenseMLP,
    Experts,
    LatentAttention,
    Layer,
    Range,
    Shard,
)
from penstock.models.description.model_config import ModelConfig
from penstock.models.families.registry import expected_tensors
from penstock.models.shards.limits import refuse_split
from penstock.models.shards.ranges import even_part, kv_part, part_in_units, vocab_part
from penstock.models.shards.units import Units, units_of


def shard_of(model: ModelConfig, place: Place, layers: Range | None = None) -> ModelConfig:
    """Return what the rank at this place computes.

    Args:
        model: the whole model.
        place: the rank's; the only rank of a group gets the model unchanged.
        layers: those of the place's stage; None: stages are even, give or take one layer.

    Raises:
        ConfigError: the model cannot be split that way.
    """
    if place.is_alone:
        return model
    if not isinstance(model, Decoder):
        if expected_tensors(model) == {} and place.num_stages == 1:
            return model  # a model without weights: every rank computes all of it
        raise ConfigError(
            f"{model.architecture} {model.why_whole}, which cannot be split over "
            f"{place.num_tensor * place.num_stages} workers"
        )
    refuse_split(model, place)
    first, end = stage_layers(len(model.layers), place) if layers is None else layers
    inputs = model.layer_inputs
    return replace(
        model,
        layers=tuple(_layer(model, number, first, place) for number in range(first, end)),
        final_norm=model.final_norm if place.is_last_stage else None,
        positions=model.positions if place.is_first_stage else None,
        has_embedding=place.is_first_stage or inputs is not None,  # each stage needs it for its layer inputs
        has_head=place.is_last_stage,
        head_bias=model.head_bias and place.is_last_stage,
        shard=Shard(
            whole=model,
            place=place,
            layers=(first, end),
            vocab=vocab_part(model.vocab_size, place.tensor, place.num_tensor),
            layer_vocab=(0, 0) if inputs is None else vocab_part(inputs.vocab_size, place.tensor, place.num_tensor),
        ),
    )


def whole_of(model: ModelConfig) -> ModelConfig:
    """Return the whole model of a part, or the model itself."""
    return model.shard.whole if isinstance(model, Decoder) and model.shard is not None else model


def check_shards(model: ModelConfig, num_tensor: int, num_stages: int = 1) -> None:
    """Check that a model can be split over these ranks and stages.

    Raises:
        ConfigError: it cannot, with the limit and the value.
    """
    for stage in range(num_stages):
        shard_of(model, Place(0, num_tensor, stage, num_stages))


def stage_layers(num_layers: int, place: Place) -> Range:
    """Return the layers of a stage, split by number alone."""
    return part_in_units(num_layers, 1, place.stage, place.num_stages)


def heads_of(mixer: Attention | LatentAttention, place: Place) -> tuple[Range, Range]:
    """Return the q heads and the KV heads of a rank; with latents there are no KV heads."""
    q = even_part(mixer.num_heads, place.tensor, place.num_tensor)
    return q, (0, 0) if isinstance(mixer, LatentAttention) else kv_part(
        mixer.num_kv_heads, place.tensor, place.num_tensor
    )


def inner_of(size: int, unit: int, place: Place) -> Range:
    """Return a rank's part of an MLP's inner size."""
    return part_in_units(size, unit, place.tensor, place.num_tensor)


def _layer(model: Decoder, number: int, first: int, place: Place) -> Layer:
    layer, units = model.layers[number], units_of(model, number)
    beside, mixer, mlp = layer.beside_mlp, layer.attention, layer.mlp
    assert mixer is not None  # others are refused
    assert mlp is not None
    return replace(
        layer,
        mixer=_mixer(mixer, first, place),
        mlp=_experts(mlp, units, place) if isinstance(mlp, Experts) else _mlp(mlp, units.mlp, place),
        beside_mlp=None if beside is None else _beside(beside, units, place),
    )


def _mixer(mixer: Attention | LatentAttention, first: int, place: Place) -> Attention | LatentAttention:
    (q_begin, q_end), (kv_begin, kv_end) = heads_of(mixer, place)
    if isinstance(mixer, LatentAttention):
        return replace(mixer, num_heads=q_end - q_begin)
    shared = mixer.shares_kv_of
    return replace(
        mixer,
        num_heads=q_end - q_begin,
        num_kv_heads=kv_end - kv_begin,
        o_bias=mixer.o_bias and place.tensor == 0,
        shares_kv_of=None if shared is None else shared - first,
    )


def _mlp(mlp: DenseMLP, unit: int, place: Place) -> DenseMLP:
    begin, end = inner_of(mlp.size, unit, place)
    return replace(mlp, size=end - begin)


def _experts(experts: Experts, units: Units, place: Place) -> Experts:
    shared = None if experts.shared is None else _mlp(experts.shared, units.shared, place)
    if experts.spread is not None:
        return replace(experts, spread=replace(experts.spread, rank=place.tensor), shared=shared)
    begin, end = inner_of(experts.size, units.experts, place)
    return replace(experts, size=end - begin, shared=shared)


def _beside(beside: BesideMLP, units: Units, place: Place) -> BesideMLP:
    return replace(beside, experts=_experts(beside.experts, units, place))
