"""Fault points for tests: a process started with faults dies, hangs, fails or waits when it reaches a fault's point.

    PENSTOCK_FAULTS="worker.step:kill@17,worker.result:delay=0.5,worker.step:kill@token=777"

    POINT:ACTION[=SECONDS][@WHEN]    WHEN: the number of the call in this process, from 1; or token=ID at worker.step,
                                     for the steps of prompts with this token; or embeddings=NUMBER at worker.encode,
                                     for images of so many; without it: each call
    PENSTOCK_FAULTS_ONCE=FOLDER      each fault happens once across all processes that have it: it leaves a file there

Faults are read once, when a process starts, and only from its environment, so no request can trigger them. A point
without a fault is a builtin that does nothing.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

FAULTS, ONCE = "PENSTOCK_FAULTS", "PENSTOCK_FAULTS_ONCE"

POINTS = (
    "worker.load",  # before loading weights
    "worker.step",  # a plan has arrived, nothing is computed yet
    "worker.computed",  # a plan's tokens are sampled
    "worker.disk",  # before a page is written to the disk
    "worker.handover",  # before parts of pages are read from another engine
    "worker.encode",  # before an image is embedded
    "worker.grammar",  # before a grammar is prepared
    "worker.adapter",  # before an adapter is read
    "worker.draft",  # before a drafter guesses
    "worker.result",  # before the result is sent
    "scheduler.plan",  # a plan is made, not sent
    "scheduler.planned",  # the plan is sent
    "scheduler.tokens",  # a result is applied, frontends do not know yet
    "frontend.tokens",  # tokens have arrived, clients do not know yet
)
ACTIONS = ("kill", "raise", "memory", "hang", "stop", "delay")
ABOUT = {"token": "worker.step", "embeddings": "worker.encode"}
"""What faults may be about, and the point that knows it."""


class InjectedFault(RuntimeError):
    """Raised by the action `raise`."""


class Fault(NamedTuple):
    """One entry of the variable."""

    point: str
    action: str
    seconds: float = 0.0
    call: int = 0  # 0: each call
    about: str = ""  # "token", "embeddings": only for those with this number
    number: int = -1

    def happen(self) -> None:
        """Perform the action, unless it has happened before and should happen only once."""
        if not _is_first(self):
            return
        match self.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                while True:
                    time.sleep(3600.0)
            case "raise":
                raise InjectedFault(f"injected at {self.point}")
            case "memory":
                raise MemoryError(f"injected at {self.point}")
            case "delay":
                time.sleep(self.seconds)


def parse(text: str) -> tuple[Fault, ...]:
    """Read the variable's value.

    Raises:
        ValueError: an entry is invalid; no entry is ignored silently.
    """
    return tuple(_parse_one(entry.strip()) for entry in text.split(",") if entry.strip())


def _parse_one(entry: str) -> Fault:
    what, _, when = entry.partition("@")
    point, _, action = what.partition(":")
    action, _, seconds = action.partition("=")
    if point not in POINTS or action not in ACTIONS:
        raise ValueError(f"{FAULTS}: {entry!r} is not POINT:ACTION[=SECONDS][@WHEN] of {POINTS} and {ACTIONS}")
    about, _, number = when.rpartition("=")
    if not about:
        return Fault(point, action, float(seconds or 0), int(number or 0))
    if ABOUT.get(about) != point:
        raise ValueError(f"{FAULTS}: {entry!r}: {point} does not know {about!r}")
    return Fault(point, action, float(seconds or 0), about=about, number=int(number))


def read(environment: Mapping[str, str]) -> tuple[Fault, ...]:
    """Return the faults that this environment asks for."""
    return parse(environment.get(FAULTS, ""))


ARMED = read(os.environ)


def point(name: str, faults: tuple[Fault, ...] = ARMED) -> Callable[[], object]:
    """Return the function to call at the named point; it counts its calls. Its result has no meaning."""
    assert name in POINTS
    found = [fault for fault in faults if fault.point == name and not fault.about]
    if not found:
        return bool  # called without arguments, it does nothing
    num_calls = 0

    def reached() -> None:
        nonlocal num_calls
        num_calls += 1
        for fault in found:
            if fault.call in (0, num_calls):
                fault.happen()

    return reached


def point_about(name: str, faults: tuple[Fault, ...] = ARMED) -> Callable[[Collection[int]], None] | None:
    """Like `point`, for faults about some numbers: call it with those concerned. None if there is no such fault."""
    found = [fault for fault in faults if fault.point == name and fault.about]

    def reached(numbers: Collection[int]) -> None:
        for fault in found:
            if fault.number in numbers:
                fault.happen()

    return reached if found else None


def _is_first(fault: Fault) -> bool:
    folder = os.environ.get(ONCE)
    if not folder:
        return True
    try:
        (Path(folder) / "-".join(map(str, fault))).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
