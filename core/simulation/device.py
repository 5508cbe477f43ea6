"""How long steps take: the interface of all device models, and the other delays between a client and the device."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec


class StepShape(NamedTuple):
    """What a step computes."""

    decodes: list[int]  # position of each
    chunks: list[tuple[int, int]]  # (first position, number of positions) of each chunk of a prompt


class Device(Protocol):
    """A model of a worker's device. If steps of one shape vary, `luck` in [0, 1) picks the duration of this one."""

    @property
    def overlaps_copies(self) -> bool:
        """Whether the device moves pages to and from the host while it computes."""

    @property
    def stages(self) -> tuple[float, ...]:
        """The part of a step's time in each pipeline stage. The parts sum to 1; without a pipeline there is one."""

    def lucks(self, seed: int) -> Iterator[float]:
        """Yield the luck of each step in order, without end."""

    def seconds(self, shape: StepShape, luck: float) -> float:
        """Seconds of a step, from reading its plan until its tokens are known."""

    def gap(self, luck: float) -> float:
        """Seconds from the end of one step to the beginning of the next, if its plan is there already."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The delays outside the device, in seconds."""

    request: float = 0.0  # from the client to the scheduler
    request_per_token: float = 0.0  # additional, for each token of the prompt
    reply: float = 0.0  # from the scheduler to the client, for a token
    first: float = 0.0  # additional, for a request's first token, with which the answer begins; it may be negative
    admission: float = 0.0  # the scheduler's time for requests that came together, until their plan is sent
    scheduler: float = 0.0  # the scheduler's time for a step: applying its result and planning another
    transport: float = 0.0  # of a plan to the worker and of its result back, together
    wake: float = 0.0  # additional, if the worker was idle for longer than the scheduler takes for a step
