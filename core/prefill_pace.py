"""How many prompt tokens may go beside decodes, so that whoever streams does not wait long for the next token.

The worker says how long each step took. One that was too long sets the bound in proportion; one that was as large as
the bound and short enough raises it. So the bound finds its place on any device, with any model and load.
"""

from penstock.core.plan_builder import InFlightStep
from penstock.ipc.messages import StepResult

_MIN_TOKENS = 16  # prompts go on, however slow the device is
_GROWTH = 1.25  # a step too many at most takes a quarter longer than it may


class PrefillPace:
    """The bound, learned from results."""

    __slots__ = ("_max_us", "max_tokens")

    def __init__(self, max_ms: int) -> None:
        """`max_ms`: what a step with prompts should take at most; 0 for any time."""
        self._max_us = max_ms * 1000
        self.max_tokens = 1 << 30  # of prompts in a step with decodes

    def note(self, step: InFlightStep, result: StepResult) -> None:
        """A step has returned."""
        num_us = result.num_forward_us
        if not self._max_us or not num_us or not step.chunks:
            return
        num_tokens = sum(chunk.num_new for chunk in step.chunks)
        if num_us > self._max_us:
            self.max_tokens = max(_MIN_TOKENS, min(self.max_tokens, num_tokens * self._max_us // num_us))
        elif num_tokens >= self.max_tokens:
            self.max_tokens = int(self.max_tokens * _GROWTH)
