"""Policies: in which order waiting requests run. The same order, backwards, chooses whom to preempt."""

from collections.abc import Callable
from typing import Literal

PolicyName = Literal["fcfs", "priority"]
Policy = Callable[[int, int], tuple[int, int]]
"""(priority, number of arrival) -> sort key; smaller runs first."""


def by_arrival(priority: int, arrival: int) -> tuple[int, int]:
    """First come, first served."""
    del priority
    return 0, arrival


def by_priority(priority: int, arrival: int) -> tuple[int, int]:
    """Lower priority numbers first; equal ones by arrival."""
    return priority, arrival


POLICIES: dict[PolicyName, Policy] = {"fcfs": by_arrival, "priority": by_priority}
