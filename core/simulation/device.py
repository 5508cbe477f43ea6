"""How long steps take: the interface of all device models, and the other delays between a client and the device."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

import msgspec


class StepShape(NamedTuple):
    """What a step computes."""

    decodes: list[int]  # position of each
    chunks: list[tuple[int, int]]  # (first position, number of positions) of each chunk of a prompt


class Walk(Protocol):
    """The durations of one run's steps, asked for in the order of the steps."""

    def seconds(self, shape: StepShape) -> float:
        """Seconds of the next step, from reading its plan until its tokens are known."""

    def gap(self) -> float:
        """Seconds from the end of the last step to the beginning of the next, if its plan is there already."""


class Device(Protocol):
    """A model of a worker's device."""

    @property
    def overlaps_copies(self) -> bool:
        """Whether the device moves pages to and from the host while it computes."""

    @property
    def stages(self) -> tuple[float, ...]:
        """The part of a step's time in each pipeline stage. The parts sum to 1; without a pipeline there is one."""

    def walk(self, seed: int) -> Walk:
        """Begin a run. Runs of different seeds may differ, if steps of one shape vary."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The delays outside the device, in seconds."""

    request: float = 0.0  # from the client to the scheduler
    frontend: float = 0.0  # the part of `request` in which the frontend handles no other request
    request_per_token: float = 0.0  # additional, for each token of the prompt
    reply: float = 0.0  # from the scheduler to the client, for a token
    first: float = 0.0  # additional, for a request's first token, with which the answer begins; it may be negative
    admission: float = 0.0  # the scheduler's time for requests that came together, until their plan is sent
    scheduler: float = 0.0  # the scheduler's time for a step: applying its result and planning another
    transport: float = 0.0  # of a plan to the worker and of its result back, together
    wake: float = 0.0  # additional, if the worker was idle for longer than the scheduler takes for a step


def frontend_waits(sent: Sequence[float], busy: float) -> list[float]:
    """Return how long each request waits for those sent before it, if the frontend needs `busy` seconds for each.

    Args:
        sent: when each was sent, in seconds, in any order.
    """
    waits = [0.0] * len(sent)
    free_at = -inf
    for number in sorted(range(len(sent)), key=sent.__getitem__):
        begins = max(sent[number], free_at)
        waits[number] = begins - sent[number]
        free_at = begins + busy
    return waits
