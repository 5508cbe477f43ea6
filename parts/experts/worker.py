"""Counts of the tokens that the experts on this rank have computed, for the scheduler."""

from collections.abc import Mapping
from time import monotonic

import torch

from penstock.gpu_worker.part import Context, WorkerPart
from penstock.ipc.messages import WorkerHello
from penstock.kernels.experts.held_experts import HeldExperts
from penstock.parts.experts.messages import ExpertTokens, LayerTokens

_TELL_SECONDS = 2.0
"""Between two messages. Reading the counts waits for the device."""


class ExpertCounts(WorkerPart):
    """Reads the counters that the layers of a model fill."""

    def __init__(self, held: Mapping[int, HeldExperts]) -> None:
        """`held`: the experts of each layer that has some, by the layer's number in the checkpoint."""
        self._held = held
        self._ids = {layer: its.ids() for layer, its in held.items()}
        self._told = {layer: [0] * len(ids) for layer, ids in self._ids.items()}
        self._told_at = monotonic()
        self.take()  # the made-up tokens of measurements and of the warm-up are nobody's load

    @classmethod
    def of(cls, context: Context) -> "ExpertCounts | None":
        return cls(context.model.held_experts) if context.model.held_experts else None

    def hello(self, hello: WorkerHello) -> WorkerHello:
        self.take()  # those of other parts' warm-up, too
        return hello

    def take_done(self) -> tuple[ExpertTokens, ...]:
        if monotonic() - self._told_at <= _TELL_SECONDS:
            return ()
        self._told_at = monotonic()
        tokens = self.take()
        return () if tokens is None else (tokens,)

    def take(self) -> ExpertTokens | None:
        """The counts of all layers since the last call; None if there are none. Waits for the device."""
        counters = list(self._held.values())
        together = torch.cat([its.tokens[: its.num_held] for its in counters]).split([its.num_held for its in counters])
        layers, has_news = [], False
        for (layer, its), now in zip(self._held.items(), together, strict=True):
            counts, told = now.tolist(), self._told[layer]
            new = {id: count - before for id, count, before in zip(self._ids[layer], counts, told, strict=True)}
            has_news |= counts != told
            self._told[layer] = counts
            layers.append(LayerTokens(layer, len(its.numbers), {id: count for id, count in new.items() if count}))
        return ExpertTokens(tuple(layers)) if has_news else None


PARTS = (ExpertCounts,)
