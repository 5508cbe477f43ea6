"""What the blocks of a model share in one step."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from penstock.gpu_worker.models.attention import Attention, Rotation
from penstock.gpu_worker.models.latent_attention import LatentPages
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.gpu_worker.state.kv_pool import LayerPages
from penstock.gpu_worker.state.state_slots import NO_STATES, States
from penstock.kernels.scan.rows import StateRows
from penstock.models.description.decoder import QueryGrowth
from penstock.models.parsing.rope import RopeConfig


class Step(NamedTuple):
    """One step of all layers."""

    inputs: ForwardInputs
    pages: Mapping[int, LayerPages]  # of each layer with attention
    attentions: Mapping[int, Attention]  # of page groups with keys and values
    latents: Mapping[int, LatentPages]  # of page groups with latents
    rotations: Mapping[RopeConfig, Rotation]
    growths: Mapping[QueryGrowth, Tensor]  # fp32[T], factors of the queries
    states: States = NO_STATES  # of each layer that keeps a state
    state_rows: StateRows | None = None  # the rows of the states
