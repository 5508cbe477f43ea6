"""How large steps may be: as the options say, or smaller after the device ran out of memory."""

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.config.options import SchedulerOptions
from penstock.config.step_limits import bounded
from penstock.core.steps.plan_builder import InFlightStep

_MAX_CUTS = 3
"""A step that still fails at an eighth of its size is not too large: something else is wrong."""


class StepSize:
    """The options that limit steps, and how often they were halved."""

    __slots__ = ("_num_cuts", "_original", "options")

    def __init__(self, options: SchedulerOptions) -> None:
        self._original = options
        self._num_cuts = 0
        self.options = options

    def cut(self, in_flight: Sequence[InFlightStep]) -> bool:
        """The oldest step in flight ran out of memory: halve the size of steps. False if that would not help."""
        if not in_flight or self._num_cuts == _MAX_CUTS:
            return False
        step, options = in_flight[0], self.options
        num_rows = len(step.decodes.seqs) + len(step.chunks)
        num_tokens = step.num_tokens
        if num_tokens < 2:
            return False
        self._num_cuts += 1
        max_num_tokens = bounded(options.max_num_batched_tokens, num_tokens // 2)
        max_num_seqs = options.max_num_seqs
        if num_rows == num_tokens:  # otherwise a chunk was too long
            max_num_seqs = bounded(max_num_seqs, num_rows // 2)
        self.options = replace(options, max_num_batched_tokens=max_num_tokens, max_num_seqs=max_num_seqs)
        return True

    def restore(self) -> None:
        """Undo the cuts: the size of steps was not the cause."""
        self._num_cuts = 0
        self.options = self._original
