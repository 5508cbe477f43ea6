"""A rank's part of a model, from the options that all ranks have."""

from penstock.config.groups.parallel import ParallelOptions
from penstock.config.options import ConfigError
from penstock.config.ranks import Place
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.shards.experts import with_experts_spread
from penstock.models.shards.shard import shard_of
from penstock.models.shards.stages import stage_ranges


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
            f"--pipeline-parallel-size {num_stages}: {model.architecture} {model.why_whole}, which cannot be split "
            "into stages"
        )
    return shard_of(model, place, stage_ranges(model, num_stages, options.pipeline_layers)[place.stage])
