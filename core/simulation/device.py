"""How long steps take: what every model of a device answers, and what else passes between a client and the device."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec


class StepShape(NamedTuple):
    """What a step computes."""

    decodes: list[int]  # each one's position
    chunks: list[tuple[int, int]]  # (first position, number of positions) of pieces of prompts


class Device(Protocol):
    """A model of a worker's device. Where steps of one shape vary, a luck in [0, 1) says how long this one is."""

    @property
    def overlaps_copies(self) -> bool:
        """Whether it moves pages to and from the host while it computes."""

    @property
    def stages(self) -> tuple[float, ...]:
        """The part of a step's time in each stage of its pipeline. They sum to 1; there is one where there is none."""

    def lucks(self, seed: int) -> Iterator[float]:
        """Of one step after the other, without end."""

    def seconds(self, shape: StepShape, luck: float) -> float:
        """Of a step, from reading its plan until its tokens are known."""

    def gap(self, luck: float) -> float:
        """Seconds from the end of the step before to its begin, if its plan is there already."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The rest of the way, in seconds."""

    request: float = 0.0  # from a client's sending until the scheduler has the request
    request_per_token: float = 0.0  # more, for each token of the prompt
    reply: float = 0.0  # from the scheduler's telling until the client has the token
    admission: float = 0.0  # the scheduler's own time for requests that came together, until their plan is sent
    scheduler: float = 0.0  # the scheduler's own time for a step: applying its result, planning another
    transport: float = 0.0  # of a plan to the worker and of its result back, together
    wake: float = 0.0  # more, for a worker that had nothing to do for longer than the scheduler needs for a step
