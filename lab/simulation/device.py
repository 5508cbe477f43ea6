"""How long steps take: the interface of all device models, and the other delays between a client and the device."""

from collections import deque
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

    def gap(self, shape: StepShape) -> float:
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
    frontend: float = 0.0  # the part of `request` for which the frontend computes; requests that overlap share it
    request_per_token: float = 0.0  # additional, for each token of the prompt
    reply: float = 0.0  # from the scheduler to the client, for a token
    first: float = 0.0  # additional, for a request's first token, with which the answer begins; it may be negative
    admission: float = 0.0  # the scheduler's time for requests that came together, until their plan is sent
    scheduler: float = 0.0  # the scheduler's time for a step: applying its result and planning another
    transport: float = 0.0  # of a plan to the worker and of its result back, together
    wake: float = 0.0  # additional, if the worker was idle for longer than the scheduler takes for a step


def frontend_waits(sent: Sequence[float], busy: float) -> list[float]:
    """Return how much longer the frontend takes for each request because it handles others at the same time.

    An event loop attends to all its requests in turn, so that each gets an equal share (processor sharing, Kleinrock
    1967). All need the same, so they leave in the order in which they came.

    Args:
        sent: when each was sent, in seconds, in any order.
        busy: seconds that the frontend computes for a request.
    """
    waits = [0.0] * len(sent)
    handled = deque[tuple[int, float]]()  # (request, its share when it is done)
    now = share = 0.0  # `share`: what a request would have got that had been there from the beginning

    def handle(until: float) -> None:
        nonlocal now, share
        while handled:
            number, enough = handled[0]
            done_at = now + (enough - share) * len(handled)
            if done_at > until:
                share += (until - now) / len(handled)
                break
            now, share = done_at, enough
            waits[number] = max(0.0, now - sent[number] - busy)
            handled.popleft()
        now = until

    for number in sorted(range(len(sent)), key=sent.__getitem__):
        handle(sent[number])
        handled.append((number, share + busy))
    handle(inf)
    return waits
