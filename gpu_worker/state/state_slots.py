"""The states that layers without keys and values keep for each row, and snapshots of these states."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device
from penstock.ipc.messages import StepPlan
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.description.recurrent import StateShape, StateTensor

States = Mapping[int, tuple[Tensor, ...]]
"""[rows, ...] for each layer with a state, with its tensors in the order of its `StateShape`."""

NO_STATES: States = {}


class StateSlots:
    """One memory for all layers' states of the same shape: [layers, rows, ...], and [layers, snapshots, ...]."""

    def __init__(
        self,
        layers: Mapping[int, StateShape],
        num_rows: int,
        device: torch.device,
        num_snapshots: int = 0,
    ) -> None:
        """All states begin as zeros."""
        having: dict[StateTensor, list[int]] = {}
        for layer, shape in layers.items():
            for part in shape:
                having.setdefault(part, []).append(layer)

        def memory(count: int) -> dict[StateTensor, Tensor]:
            return {part: torch.zeros(len(its), count, *part.shape, device=device) for part, its in having.items()}

        live = memory(num_rows)
        self._live = tuple(live.values())
        self._kept = tuple(memory(num_snapshots).values())
        self.num_snapshots = num_snapshots
        self.layers: States = {
            layer: tuple(live[part][having[part].index(layer)] for part in shape) for layer, shape in layers.items()
        }

    def begin(self, plan: StepPlan, device: Device) -> None:
        """Before the forward pass: take snapshots, then set new rows to the initial state or to that of a snapshot."""
        if plan.state_saves:
            rows, places = _index(plan.state_saves, device)
            for live, kept in zip(self._live, self._kept, strict=True):
                kept.index_copy_(1, places, live.index_select(1, rows))
        if plan.new_rows:
            index = device.upload(np.array([new.row for new in plan.new_rows], dtype=np.int64))
            for live in self._live:
                live.index_fill_(1, index, 0)
        if plan.state_loads:
            rows, places = _index(plan.state_loads, device)
            for live, kept in zip(self._live, self._kept, strict=True):
                live.index_copy_(1, rows, kept.index_select(1, places))


def state_slots(model: ModelConfig, num_rows: int, device: torch.device, num_snapshots: int = 0) -> StateSlots | None:
    """The memory that a model needs; None if its layers keep no states."""
    layers = model.state_layers if isinstance(model, Decoder) else {}
    return StateSlots(layers, num_rows, device, num_snapshots) if layers else None


def _index(pairs: bytes, device: Device) -> tuple[Tensor, Tensor]:
    index = device.upload(np.frombuffer(pairs, dtype=np.int32).reshape(-1, 2).T.astype(np.int64))
    return index[0], index[1]
