"""Policies: the level of a request. Lower levels run first, and under some policies take rows from higher ones."""

from collections.abc import Callable
from typing import Literal, NamedTuple

PolicyName = Literal["fcfs", "priority"]


class Policy(NamedTuple):
    """How a request's level is found, and what it is worth."""

    level: Callable[[int], int]
    """priority -> level"""
    preempts: bool
    """A waiting sequence takes the row of a running one of a higher level."""


POLICIES: dict[PolicyName, Policy] = {
    "fcfs": Policy(lambda priority: 0, preempts=False),
    "priority": Policy(lambda priority: priority, preempts=True),
}
