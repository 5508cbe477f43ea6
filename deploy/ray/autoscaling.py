"""How many engines the load needs: Ray Serve's autoscaling policy for the engines' deployment.

Serve calls it in each iteration of its control loop, and then applies the deployment's bounds and delays.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any, Protocol

WAITING_TOKENS, RUNNING, ROWS = "waiting_tokens", "running", "rows"
"""What engines report (`Engine.record_autoscaling_stats`)."""

_Values = Mapping[str, Mapping[Any, float]]


class Context(Protocol):
    """The used part of Serve's `AutoscalingContext`."""

    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> _Values | None:
        """Metric -> replica -> value, over the look-back period."""


class WaitingTokens:
    """Enough engines for the rows in use, and one more for each `target_waiting_tokens` that wait for a row."""

    def __init__(self, target_waiting_tokens: int = 4096) -> None:
        self._target = target_waiting_tokens

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """The wanted number of engines, and the state to keep (none)."""
        told = context.aggregated_metrics or {}
        waiting, running, rows = (told.get(name, {}) for name in (WAITING_TOKENS, RUNNING, ROWS))
        if not rows:  # no engine has reported yet
            return context.target_num_replicas, {}
        in_use = sum(running.get(replica, 0.0) / max(count, 1.0) for replica, count in rows.items())
        return ceil(in_use + sum(waiting.values()) / self._target), {}
