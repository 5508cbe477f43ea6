"""A rank's part of a model, from the options that all ranks have."""

from penstock.core.checkpoint.description.decoder import Decoder
from penstock.core.checkpoint.description.model_config import ModelConfig
from penstock.core.checkpoint.shards.experts import with_experts_spread
from penstock.core.checkpoint.shards.shard import shard_of
from penstock.core.checkpoint.shards.stages import stage_ranges
from penstock.core.config.groups.parallel import ParallelOptions
from penstock.core.config.options import ConfigError
from penstock.core.config.ranks import Place


def rank_part(model: ModelConfig, options: ParallelOptions, number: int) -> ModelConfig:
    """Return the part of the rank with this number.

    Raises:
        ConfigError: the model cannot be split that way.
    """
    model = with_experts_spread(model, options)
    place, num_stages = Place.of(number, options), options.pipeline_parallel_size
    if num_stages == 1 and not options.pipeline_layers:
        return shard_of(model, place)
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages}: {model.architecture} is computed by transformers' code, which "
            "cannot be split into stages"
        )
    return shard_of(model, place, stage_ranges(model, num_stages, options.pipeline_layers)[place.stage])
