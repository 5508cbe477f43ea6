"""Spreads the experts of a model over tensor ranks, by the tokens that went to each."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from penstock.config.groups.parallel import ParallelOptions
from penstock.config.options import ConfigError
from penstock.models.description.decoder import BesideMLP, Decoder, Experts, Layer, Spread
from penstock.models.description.model_config import ModelConfig
from penstock.models.shards.exchange import fewest_travelling_tokens
from penstock.models.shards.placement import place_experts

_BYTES_OF_NUMBER = 2  # of activations, on most devices

_FLAG = "--enable-expert-parallel"


class _Load(msgspec.Struct):
    """The answer of `GET /debug/expert_load`."""

    layers: dict[int, list[int]]


def with_experts_spread(model: ModelConfig, options: ParallelOptions) -> ModelConfig:
    """Return the whole model, with a placement of its experts if the options ask for one.

    Raises:
        ConfigError: an option does not fit this model, or needs another option; or the file cannot be read.
    """
    if not options.enable_expert_parallel:
        for flag, value in (
            ("--num-redundant-experts", options.num_redundant_experts),
            ("--expert-load", options.expert_load),
            ("expert_exchange", options.expert_exchange != "auto"),
        ):
            if value:
                raise ConfigError(f"{flag} needs {_FLAG}")
        return model
    if not isinstance(model, Decoder) or not any(map(_experts, model.layers)):
        raise ConfigError(f"{_FLAG}: {model.architecture} has no experts that could be spread over workers")
    if options.tensor_parallel_size == 1:
        raise ConfigError(
            f"{_FLAG} needs --tensor-parallel-size of at least 2, which is how many workers share experts"
        )
    tokens = read_expert_load(Path(options.expert_load)) if options.expert_load else {}
    layers = [_spread(model, layer, options, tokens.get(number)) for number, layer in enumerate(model.layers)]
    return replace(model, layers=tuple(layers))


def placement_digest(model: ModelConfig) -> str:
    """Return 16 hex digits that are equal for equal placements; empty if experts are not spread."""
    whole = model.shard.whole if isinstance(model, Decoder) and model.shard is not None else model
    layers = whole.layers if isinstance(whole, Decoder) else ()
    placed = [its.spread.ranks_of for its in map(_experts, layers) if its is not None and its.spread is not None]
    return hashlib.sha256(msgspec.json.encode(placed)).hexdigest()[:16] if placed else ""


def read_expert_load(path: Path) -> Mapping[int, list[int]]:
    """Read the tokens of each expert, by layer number.

    Raises:
        ConfigError: the file is missing, or has another form.
    """
    try:
        layers = msgspec.json.decode(path.read_bytes(), type=_Load).layers
    except OSError as error:
        raise ConfigError(f"--expert-load: cannot read {str(path)!r}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"--expert-load: {str(path)!r} is not what GET /debug/expert_load answers: {error}") from None
    if any(count < 0 for counts in layers.values() for count in counts):
        raise ConfigError(f"--expert-load: {str(path)!r} has negative numbers of tokens")
    return layers


def _experts(layer: Layer) -> Experts | None:
    if layer.beside_mlp is not None:
        return layer.beside_mlp.experts
    return layer.mlp if isinstance(layer.mlp, Experts) else None


def _spread(model: Decoder, layer: Layer, options: ParallelOptions, tokens: list[int] | None) -> Layer:
    experts = _experts(layer)
    if experts is None:
        return layer
    num_ranks = options.tensor_parallel_size
    ranks_of = place_experts(experts.count, num_ranks, options.num_redundant_experts, tokens)
    # The output of shared experts is summed over the ranks anyway, and the other experts' output with it.
    fewest, can_travel = None, layer.beside_mlp is None and not layer.is_parallel
    if options.expert_exchange == "auto" and can_travel and experts.shared is None:
        fewest = fewest_travelling_tokens(num_ranks, experts.router.top_k, _BYTES_OF_NUMBER * model.hidden_size)
    elif options.expert_exchange == "all-to-all":
        if not can_travel:
            raise ConfigError(
                f"expert_exchange all-to-all: {model.architecture} adds what its experts give to what other parts "
                "of the layer give, so tokens do not travel; use all-reduce"
            )
        fewest = 0
    spread = replace(experts, spread=Spread(ranks_of=ranks_of, fewest_travelling=fewest))
    beside: BesideMLP | None = layer.beside_mlp
    if beside is not None:
        return replace(layer, beside_mlp=replace(beside, experts=spread))
    return replace(layer, mlp=spread)
