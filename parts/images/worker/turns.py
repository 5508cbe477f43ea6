"""Decides when a vision tower may go on, on a device that it shares with steps."""

from collections import deque
from statistics import median

import numpy as np

from penstock.ipc.messages import StepPlan

_STEPS_SHARE = 2.0
"""While there are steps, the tower pauses for this many times the time of its last turn. So during a flood of images,
streams go on at about two thirds of their speed."""

_SHORTEST_SECONDS, _PART_OF_STEP = 0.001, 0.4
"""The shortest turn, and how long a turn is beside a usual recent step. A stream feels one turn between two of its
tokens: so the pause between them grows by less than half, however long steps are."""

_NUM_RECENT = 9  # steps

_MOST_YIELDED = 4
"""The most consecutive steps with prompts that go before the tower; without a limit it might wait for ever."""


class Turns:
    """The tower's turns. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._not_before = 0.0
        self._are_shared = False  # whether there has been a step since the tower's last turn
        self._num_yielded = 0
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)  # seconds of steps

    @property
    def length(self) -> float:
        """How long the tower may go on, unless a single part of it takes longer."""
        return max(_SHORTEST_SECONDS, _PART_OF_STEP * median(self._recent)) if self._recent else _SHORTEST_SECONDS

    def is_towers(self, now: float) -> bool:
        """Whether the tower may go on."""
        return now >= self._not_before

    def yields_to(self, plan: StepPlan) -> bool:
        """Whether the tower, whose turn it is, lets this step go first.

        A step with a prompt is long already, so streams would feel the tower's additional time most there.
        """
        num_new, num_drafts = (np.frombuffer(each, dtype=np.int32) for each in (plan.num_new, plan.num_drafts))
        has_prompt = num_new.sum() - num_drafts.sum() > num_new.shape[0]
        self._num_yielded = self._num_yielded + 1 if has_prompt and self._num_yielded < _MOST_YIELDED else 0
        return self._num_yielded > 0

    def stepped(self, seconds: float) -> None:
        """Note that a step has been computed, in this time."""
        self._are_shared = True
        self._recent.append(seconds)

    def encoded(self, began: float, ended: float) -> None:
        """Note a turn of the tower."""
        self._not_before = ended + (ended - began) * _STEPS_SHARE if self._are_shared else ended
        self._are_shared = False
