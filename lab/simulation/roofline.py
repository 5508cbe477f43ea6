"""A device model from the planner's rooflines: step times as in `lab/planning/plan.py`, from running sums."""

from functools import cache
from typing import Self

from penstock.lab.planning.plan import Plan
from penstock.lab.simulation.device import StepShape
from penstock.models.description.decoder import Attention, positions_seen


class RooflineDevice:
    """The devices of a plan as one. Steps of equal shape take equally long."""

    overlaps_copies = True

    def __init__(self, plan: Plan, efficiency: float = 1.0) -> None:
        """`efficiency`: the part of the roofline's speed that steps reach."""
        self._plan = plan
        self._efficiency = efficiency
        self.stages = plan.stage_shares
        costs, decoder = plan.costs, plan.costs.decoder
        self._head = 2.0 * decoder.vocab_size * decoder.hidden_size  # operations per sequence
        self._dense = 2.0 * costs.num_active - self._head  # operations per token
        self._weight_bytes = cache(costs.weight_bytes_read)
        groups: dict[int | None, tuple[float, float]] = {}
        for _, mixer in decoder.attentions:
            kv = mixer.kv
            each = 2 * mixer.head_dim if isinstance(mixer, Attention) else 2 * mixer.kv_rank + mixer.rope_dim
            window = mixer.window if isinstance(mixer, Attention) else None
            read, computed = groups.get(window, (0.0, 0.0))
            read += costs.kv_bytes_of(kv)
            groups[window] = read, computed + 2.0 * mixer.num_heads * each
        self._layers = [(window, *figures) for window, figures in groups.items()]  # grouped by equal attention

    def walk(self, seed: int) -> Self:
        return self

    def seconds(self, shape: StepShape) -> float:
        decodes, chunks = shape
        num_rows = len(decodes) + len(chunks)
        num_tokens = len(decodes) + sum(count for _, count in chunks)
        num_bytes = self._weight_bytes(num_tokens)
        operations = self._dense * num_tokens + self._head * num_rows
        for window, read, computed in self._layers:
            if window is None:
                seen = kept = float(sum(decodes) + len(decodes))
            else:
                seen = kept = float(sum([min(position + 1, window) for position in decodes]))
            for first, count in chunks:
                seen += positions_seen(first, count, window)
                kept += first + count if window is None else min(first + count, window)
            num_bytes += read * kept
            operations += computed * seen
        return self._plan.step(num_tokens, num_bytes, operations).seconds / self._efficiency

    def gap(self, shape: StepShape) -> float:
        return 0.0
