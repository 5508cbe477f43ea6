"""What each rank of a copy holds, by the code that splits the model for serving.

Replicated KV heads and norms are on every rank, a tied embedding is on the first and the last stage, redundant experts
are on several ranks, and stages differ.
"""

import math
from functools import cache
from typing import NamedTuple

from penstock.config.groups.parallel import ParallelOptions
from penstock.lab.planning.costs import BYTES, Costs
from penstock.lab.planning.quantized_bytes import quantized_bytes
from penstock.models.description.decoder import Decoder
from penstock.models.shards.rank_part import rank_part
from penstock.models.shards.sources import sources_of
from penstock.models.weights.decoder import all_sources


class RankPart(NamedTuple):
    """The part of one rank."""

    weight_bytes: float
    costs: Costs  # costs of its part of the decoder


@cache
def rank_parts(costs: Costs, options: ParallelOptions) -> tuple[RankPart, ...]:
    """Return the part of the first tensor rank of each stage; no other rank of the stage holds more.

    Raises:
        ConfigError: the model cannot be split in this way.
    """
    parts = []
    for first in range(0, options.num_ranks, options.tensor_parallel_size):
        its = rank_part(costs.decoder, options, first)
        assert isinstance(its, Decoder)
        tower = _tower_bytes(costs) if options.pipeline_parallel_size == 1 else 0.0  # a pipeline takes only text
        parts.append(RankPart(_weight_bytes(costs, its) + tower, costs._replace(decoder=its)))
    return tuple(parts)


def _tower_bytes(costs: Costs) -> float:
    """Bytes of a vision tower, which every rank has, as floats."""
    vision = costs.decoder.vision
    num_weights = 0 if vision is None else sum(map(math.prod, vision.tensors.values()))
    return num_weights * max(BYTES[costs.weights], BYTES["fp16"])


def _weight_bytes(costs: Costs, decoder: Decoder) -> float:
    parts = {
        (name, source.cut(i)): (math.prod(source.part_shape(i)), math.prod(source.shapes[i]))
        for source in all_sources(sources_of(decoder))
        for i, name in enumerate(source.names)
    }
    if costs.decoder.quantization is None:
        return sum(part for part, _ in parts.values()) * BYTES[costs.weights]
    of_tensors = quantized_bytes(costs.decoder).of_tensors
    return sum(of_tensors[name] * part / whole for (name, _), (part, whole) in parts.items())
