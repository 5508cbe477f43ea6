"""What the blocks of a model share in one step."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from penstock.core.checkpoint.decoder import QueryGrowth
from penstock.core.checkpoint.families.rope import RopeConfig
from penstock.gpu_worker.models.attention import Attention, Rotation
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.gpu_worker.state.kv_pool import LayerPages


class Step(NamedTuple):
    """One step of all layers."""

    inputs: ForwardInputs
    pages: tuple[LayerPages, ...]  # of each layer
    attentions: tuple[Attention, ...]  # of each page group
    rotations: Mapping[RopeConfig, Rotation]
    growths: Mapping[QueryGrowth, Tensor]  # fp32[T], of queries
