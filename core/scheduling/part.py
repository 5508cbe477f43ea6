"""What requests may do without, as the scheduler sees it: grammars, images, a disk, other engines.

A part overrides the methods that it needs, and only those are ever called: the scheduler asks once for each worker who
overrides what. So a part that is not there costs nothing. Parts are as pure as the scheduler.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from math import inf
from typing import Any, ClassVar, NamedTuple

from penstock.core.kv.kv_pages import Start
from penstock.core.sequences.intake import WorkerLimits
from penstock.core.sequences.sequence import Owner, Request, Sequence
from penstock.core.steps.plan_builder import Chunk
from penstock.ipc.messages import ErrorCode
from penstock.ipc.overrides import calls, overriding


class Ending(NamedTuple):
    """A waiting request that must end, and why."""

    request: Request
    error: str
    code: ErrorCode


class SchedulerPart:
    """Something that some requests need. What it holds for a request, it lets go when the request leaves."""

    __slots__ = ()

    stats_field: ClassVar[str] = ""
    """The field of `EngineStats` that `stats` fills; empty: there is nothing to tell."""

    asks_worker: ClassVar[bool] = False
    """Whether what it waits for is made by the worker: then it is asked for before others are preempted."""

    holds_for: ClassVar[str] = ""
    """What it holds requests for, where `why` has figures: a kind of reason (`step_record.py`)."""

    def admits(self, seq: Sequence, start: Start) -> bool:
        """Whether the head of the queue may enter a row; otherwise this part holds it, off the queue, until it may."""
        return True

    def entered(self, seq: Sequence, num_cached: int) -> int:
        """A sequence has got a row, and `num_cached` of its tokens need not be computed here.

        Returns how many of these came from a prefix cache: other engines may have computed some of them for it.
        """
        return num_cached

    def advance(self, *, is_idle: bool) -> Iterable[Ending]:
        """Do what is due before the next plan; return what must end. `is_idle`: nothing runs and nothing waits."""
        return ()

    def planned(self, chunks: ListOf[Chunk], step_id: int) -> None:
        """A plan has these chunks of prompts."""

    def left_row(self, seq: Sequence) -> bool:
        """A sequence is about to lose its row; return whether its pages are kept: then they must not be released."""
        return False

    def leave(self, request: Request) -> None:
        """A request has ended or is paused: it waits for nothing."""

    def let_go(self, request: Request) -> None:
        """Others are tried before this waiting request: free what the worker has made for it. It asks again later."""

    def leave_owner(self, owner: Owner) -> None:
        """A frontend, or another engine, is gone."""

    def make_way(self, *, is_idle: bool) -> bool:
        """The head of the queue lacks pages; return whether there may be more now. `is_idle`: nothing runs."""
        return False

    def reset(self, limits: WorkerLimits, *, has_died: bool) -> Iterable[Ending]:
        """The worker is gone, and another one has come, with these limits; return what must end."""
        return ()

    def drop_cached(self) -> None:
        """Forget what is only kept because it may be useful."""

    @property
    def wakes_at(self) -> float:
        """When `advance` has something to do even if nothing else happens; or inf."""
        return inf

    @property
    def awaits_plan(self) -> bool:
        """Whether a plan must be sent even if it computes nothing."""
        return False

    @property
    def num_in_making(self) -> int:
        """How much the worker makes for it beside its steps, or is to make."""
        return 0

    def why(self, request: Request) -> str:
        """The figures of a request that is held for `holds_for`; "" if there are none."""
        return ""

    def stats(self) -> Any:
        """The counters, as they are sent to the frontends."""
        raise NotImplementedError


class Parts:
    """The parts that one worker's scheduler has, and who of them overrides what."""

    def __init__(self, found: Iterable[SchedulerPart | None]) -> None:
        """`found`: in the order in which they are asked; None where one is not there."""
        self.all = tuple(part for part in found if part is not None)
        self.admits: list[Callable[[Sequence, Start], bool]] = self._calls("admits")
        self.asked_early: list[Callable[[Sequence, Start], bool]] = [
            part.admits for part in self.all if part.asks_worker
        ]
        self.entered: list[Callable[[Sequence, int], int]] = self._calls("entered")
        self.advance: list[Callable[..., Iterable[Ending]]] = self._calls("advance")
        self.planned = self._calls("planned")
        self.left_row: list[Callable[[Sequence], bool]] = self._calls("left_row")
        self.leave = self._calls("leave")
        self.let_go = self._calls("let_go")
        self.leave_owner = self._calls("leave_owner")
        self.make_way: list[Callable[..., bool]] = self._calls("make_way")
        self.reset: list[Callable[..., Iterable[Ending]]] = self._calls("reset")
        self.drop_cached = self._calls("drop_cached")
        self.why: dict[str, Callable[[Request], str]] = {
            part.holds_for: part.why for part in overriding(SchedulerPart, self.all, "why")
        }
        """By what requests are held for: one that is held by one part may have figures of another, from before."""
        self._waking = overriding(SchedulerPart, self.all, "wakes_at")
        self._planning = overriding(SchedulerPart, self.all, "awaits_plan")
        self._making = overriding(SchedulerPart, self.all, "num_in_making")

    def _calls(self, name: str) -> list[Callable[..., Any]]:
        return calls(SchedulerPart, self.all, name)

    @property
    def wakes_at(self) -> float:
        """The earliest of the parts'."""
        return min((part.wakes_at for part in self._waking), default=inf)

    @property
    def await_plan(self) -> bool:
        """Whether some part awaits a plan."""
        return any(part.awaits_plan for part in self._planning)

    @property
    def num_in_making(self) -> int:
        """How much the worker makes beside its steps, or is to make."""
        return sum(part.num_in_making for part in self._making)

    def stats(self) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        return {part.stats_field: part.stats() for part in self.all if part.stats_field}
