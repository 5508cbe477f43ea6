"""What requests may do without, as the scheduler sees it. `config/parts.py` finds who there is.

A part overrides the methods that it needs, and only those are ever called: the scheduler asks once for each worker who
overrides what. So a part that is not there costs nothing. Parts are as pure as the scheduler.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListOf
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from penstock.config import Config
from penstock.config.parts import brought
from penstock.core.kv.holder import PageTables
from penstock.core.kv.kv_pages import Start
from penstock.core.scheduling.answers import Heard
from penstock.core.scheduling.policy import Policy
from penstock.core.scheduling.trials import Suspect, Trials
from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.limits import WorkerLimits
from penstock.core.sequences.sequence import Owner, Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.drafts import DraftOutcome, DraftRoom
from penstock.core.steps.plan_builder import Chunk, InFlightStep
from penstock.core.steps.prefill_pace import Room
from penstock.ipc.messages import ErrorCode, Message, StepResult
from penstock.ipc.overrides import calls, overriding

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler

_Part = TypeVar("_Part", bound="SchedulerPart")


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

    holds_for: ClassVar[str] = ""
    """What it holds requests for, where `why` has figures: a kind of reason (`step_record.py`)."""

    answers: ClassVar[Heard] = ()
    """The workers' messages that are this part's, and how those of several ranks become one."""

    orders: ClassVar[tuple[type[Message], ...]] = ()
    """Messages of frontends that it takes if they come from its own process; from others an `EnginePart` takes them."""

    policy: Policy | None = None
    """An order of requests other than first come, first served."""

    @classmethod
    def check_options(cls, config: Config) -> None:
        """Make sure, before anything is loaded, that there is what options name.

        Raises:
            ConfigError: if not.
        """

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self | None:
        """Return the part for the scheduler's current worker, or None if this worker needs none.

        Args:
            scheduler: with limits, pages and rows of this worker, and nothing in them.
            before: the part of an earlier worker. It may go on; whoever is returned gets a `reset`, unless this is the
                scheduler's first worker.
        """
        raise NotImplementedError

    @staticmethod
    def missed(request: Request) -> Refusal | None:
        """`of` has returned None for this worker: return why a request cannot run without the part."""
        return None

    def accepts(self, request: Request) -> Refusal | None:
        """A request has come, or it waits and the worker is another one: return why it cannot run here."""
        return None

    def order(self, message: Any) -> None:
        """A frontend in this process has sent one of `orders`."""
        raise NotImplementedError

    def take_news(self) -> Iterable[Message]:
        """Return what a frontend in this process must know, since the last call."""
        return ()

    def arriving(self, request: Request, now: float) -> Refusal | None:
        """A request that could run here is about to wait: set its level; or return why it must not wait."""
        return None

    def arrived(self, request: Request) -> None:
        """A request was accepted, and waits."""

    def waits(self, request: Request) -> None:
        """A sequence of the request waits again: it has lost its row, or was paused until now."""

    def makes_for(self, request: Request) -> Iterable[Suspect]:
        """What a worker makes for this request beside its steps, and may die of."""
        return ()

    def answered(self, message: Any) -> Iterable[Ending]:
        """The workers have sent one of `answers`; return what must end."""
        return ()

    def recorded(self, message: Any) -> Mapping[str, Any] | None:
        """What a recording keeps of such an answer, which is not applied yet: fields of an `Encoded` line, or None."""
        return None

    def take_before_plan(self) -> Iterable[Message]:
        """Return the messages, since the last call, that workers must get before the plan that was just made.

        This and `take_behind_plan` are called, in this order, even if there was nothing to plan.
        """
        return ()

    def take_behind_plan(self) -> Iterable[Message]:
        """Return the messages, since the last call, that workers must get behind the plan that was made last."""
        return ()

    def planning(self) -> None:
        """A step is about to be planned, and has taken what it takes from some for others.

        Some decodes may have to pause now (`RunningSet.hold_back`).
        """

    def divide(self, room: Room) -> None:
        """This is the room that the decodes of a step leave for prompts: some may get only a part (`Room.limit`)."""

    def check_head(self) -> None:
        """The head of the queue may get a row in this step, unless another one comes first now."""

    def why_not(self, request: Request, room: Room) -> str:
        """Why the head of the queue must wait, whatever rows and pages there are (a kind of reason); "": it need not.

        `room`: what the step has left for prompts.
        """
        return ""

    def why_not_join(self, request: Request) -> str:
        """Why the head of the queue, which finds a row, must not join those that run yet; "": it may."""
        return ""

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

    def expire(self) -> Iterable[Ending]:
        """Return what has waited for too long. Called several times a second, whether or not there is a next plan."""
        return ()

    @property
    def longest_step_us(self) -> float:
        """The longest time, in microseconds, for a step that computes prompts beside decodes; or inf."""
        return inf

    def chunk_end(self, seq: Sequence, start: int, end: int, most: int) -> int:
        """Return where a chunk of a prompt from position `start` on must end, if `end` is the preferred place.

        The answer is between `start` and `most`; it is `start` if there is not enough room.
        """
        return end

    def num_drafts(self, decodes: ListOf[Sequence], room: DraftRoom) -> ListOf[int]:
        """How many positions each of these decodes may compute in the next step beyond its own; empty: none.

        One part at most decides this.
        """
        return ()

    @property
    def why_drafts(self) -> str:
        """The reason for the last answer of `num_drafts`, for the record of the step."""
        return ""

    def drafts_us(self, num_drafts: ListOf[int]) -> float:
        """Estimate how many microseconds so many further positions of each decode add to a step."""
        return 0.0

    def planned(self, chunks: ListOf[Chunk], step_id: int) -> None:
        """A plan has these chunks of prompts."""

    def stepped(self, step: InFlightStep, result: StepResult, outcome: DraftOutcome | None) -> None:
        """A step has returned; its tokens are not applied yet. `outcome`: what came of its drafts, if it had any."""

    def applied(self, step: InFlightStep, result: StepResult) -> None:
        """A step's result has been applied."""

    def take_errors(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return what has failed in steps since the last call, for the log: events with their fields."""
        return ()

    def copied(self, result: StepResult) -> None:
        """Copies of pages between device and host have ended: how many, and in what time."""

    def finished(self, request: Request, num_outputs: int) -> None:
        """A sequence of the request that has a row ends with `num_outputs` tokens of output (vectors are left out)."""

    def swaps_out(self, seq: Sequence) -> bool:
        """A running sequence is about to be preempted; return whether its pages are kept elsewhere until it is back."""
        return False

    def keeps_pages(self, seq: Sequence) -> bool:
        """A sequence is about to lose its row; return whether its pages are kept: then they must not be released."""
        return False

    def leave(self, request: Request) -> None:
        """A request has ended (it is not live any more) or is paused: it waits for nothing."""

    def let_go(self, request: Request) -> None:
        """Others are tried before this waiting request: free what the worker has made for it. It asks again later."""

    def leave_owner(self, owner: Owner) -> None:
        """A frontend, or another engine, is gone."""

    def make_way(self, *, is_idle: bool) -> bool:
        """The head of the queue lacks pages; return whether there may be more now. `is_idle`: nothing runs."""
        return False

    def reset(self, limits: WorkerLimits, *, has_died: bool) -> Iterable[Ending]:
        """The worker is gone, and another one has come, with these limits; return what must end.

        The requests that it held are in the queue again.
        """
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

    @property
    def num_unfinished(self) -> int:
        """How much is still to be done, even without requests, before the process may end."""
        return 0

    def tier(self) -> Mapping[str, int]:
        """If it is a tier of pages: how many places there are, and how many in each state; for the live view."""
        return {}

    def why(self, request: Request) -> str:
        """The figures of a request that is held for `holds_for`; "" if there are none."""
        return ""

    def stats(self) -> Any:
        """The counters, as they are sent to the frontends."""
        raise NotImplementedError

    def holders(self) -> Iterable[PageTables]:
        """Who holds pages, beside running sequences; for checks."""
        return ()

    def held_host_pages(self) -> Iterable[int]:
        """The host's pages that it holds; for checks."""
        return ()

    def check(self, scheduler: "Scheduler") -> Iterable[tuple[bool, str]]:
        """What must be true of its state, and whether it is; for checks."""
        return ()


class Gate(SchedulerPart):
    """Lets a request enter a row only once the worker has made something for it, which is asked for before a plan.

    Nobody is preempted for a request before what it needs is made.
    """

    __slots__ = ("_waiting", "messages", "trials")

    def __init__(self, waiting: WaitingQueue, trials: Trials) -> None:
        self._waiting = waiting
        self.messages: list[Message] = []  # for the worker, until they are taken
        self.trials = trials
        """Shared by all gates: one suspect at a time is made, and nothing else beside it."""

    def take_before_plan(self) -> ListOf[Message]:
        if not self.messages:
            return ()
        messages, self.messages = self.messages, []
        return messages


def check_options(config: Config) -> None:
    """Make sure that there is what options name.

    Raises:
        ConfigError: from a part, if not.
    """
    for kind in brought("scheduler", SchedulerPart):
        kind.check_options(config)


class Parts:
    """The parts that one worker's scheduler has, and who of them overrides what."""

    def __init__(self, found: Iterable[SchedulerPart]) -> None:
        """`found`: in the order in which they are asked."""
        self.all = tuple(found)
        self._by_kind = {type(part): part for part in self.all}
        self._last = self._by_kind  # those of earlier workers, too
        self.accepts: list[Callable[[Request], Refusal | None]] = self._calls("accepts")
        self.arriving: list[Callable[[Request, float], Refusal | None]] = self._calls("arriving")
        self.arrived = self._calls("arrived")
        self.waits = self._calls("waits")
        self.makes_for: list[Callable[[Request], Iterable[Suspect]]] = self._calls("makes_for")
        self.answered: dict[type[Message], Callable[[Any], Iterable[Ending]]] = {
            kind: part.answered for part in self.all for kind, _ in part.answers
        }
        self.recorded: dict[type[Message], Callable[[Any], Mapping[str, Any] | None]] = {
            kind: part.recorded for part in self.all for kind, _ in part.answers
        }
        self._before_plan: list[Callable[[], Iterable[Message]]] = self._calls("take_before_plan")
        self._behind_plan: list[Callable[[], Iterable[Message]]] = self._calls("take_behind_plan")
        self.planning = self._calls("planning")
        self.divide = self._calls("divide")
        self.check_head = self._calls("check_head")
        self.why_not: list[Callable[[Request, Room], str]] = self._calls("why_not")
        self.why_not_join: list[Callable[[Request], str]] = self._calls("why_not_join")
        self.admits: list[Callable[[Sequence, Start], bool]] = self._calls("admits")
        self.asked_early: list[Callable[[Sequence, Start], bool]] = [
            part.admits for part in self.all if isinstance(part, Gate)
        ]
        self.entered: list[Callable[[Sequence, int], int]] = self._calls("entered")
        self.advance: list[Callable[..., Iterable[Ending]]] = self._calls("advance")
        self.expire: list[Callable[[], Iterable[Ending]]] = self._calls("expire")
        self._chunk_ends: list[Callable[[Sequence, int, int, int], int]] = self._calls("chunk_end")
        drafting = overriding(SchedulerPart, self.all, "num_drafts")
        self.has_drafts = bool(drafting)
        self.drafting = next(iter(drafting), SchedulerPart())
        self.planned = self._calls("planned")
        self.stepped = self._calls("stepped")
        self.applied = self._calls("applied")
        self.take_errors: list[Callable[[], Iterable[tuple[str, Mapping[str, Any]]]]] = self._calls("take_errors")
        self.finished = self._calls("finished")
        self.copied = self._calls("copied")
        self.swaps_out: list[Callable[[Sequence], bool]] = self._calls("swaps_out")
        self.keeps_pages: list[Callable[[Sequence], bool]] = self._calls("keeps_pages")
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
        self.policy = next((part.policy for part in self.all if part.policy is not None), Policy())
        self._limiting = overriding(SchedulerPart, self.all, "longest_step_us")
        self._waking = overriding(SchedulerPart, self.all, "wakes_at")
        self._planning = overriding(SchedulerPart, self.all, "awaits_plan")
        self._making = overriding(SchedulerPart, self.all, "num_in_making")
        self._finishing = overriding(SchedulerPart, self.all, "num_unfinished")

    @classmethod
    def of(cls, scheduler: "Scheduler", before: "Parts") -> "Parts":
        """The parts for a scheduler's current worker; `before`: those of the worker before."""
        found = {kind: kind.of(scheduler, before._last.get(kind)) for kind in brought("scheduler", SchedulerPart)}
        parts = cls(part for part in found.values() if part is not None)
        parts.accepts[:0] = [
            kind.missed for kind, part in found.items() if part is None and kind.missed is not SchedulerPart.missed
        ]
        parts._last = before._last | parts._by_kind
        return parts

    def get(self, kind: type[_Part]) -> _Part | None:
        """The part of this class, if there is one."""
        part = self._by_kind.get(kind)
        return part if isinstance(part, kind) else None

    def _calls(self, name: str) -> list[Callable[..., Any]]:
        return calls(SchedulerPart, self.all, name)

    def take_messages(self, *, before_plan: bool) -> list[Message]:
        """The parts' messages for the workers."""
        messages: list[Message] = []
        for take in self._before_plan if before_plan else self._behind_plan:
            messages += take()
        return messages

    def refusal(self, request: Request) -> Refusal | None:
        """Why a request cannot run here, as far as parts know."""
        return next(filter(None, (accepts(request) for accepts in self.accepts)), None)

    @property
    def longest_step_us(self) -> float:
        """The shortest of the parts'."""
        return min((part.longest_step_us for part in self._limiting), default=inf)

    def chunk_end(self, seq: Sequence, start: int, end: int, most: int) -> int:
        """Where a chunk must end: at `end`, unless a part wants another place up to `most`."""
        for chunk_end in self._chunk_ends:
            end = chunk_end(seq, start, end, most)
        return end

    @property
    def wakes_at(self) -> float:
        """The earliest of the parts'."""
        return min((part.wakes_at for part in self._waking), default=inf)

    @property
    def awaits_plan(self) -> bool:
        """Whether some part awaits a plan."""
        return any(part.awaits_plan for part in self._planning)

    @property
    def num_in_making(self) -> int:
        """How much the worker makes beside its steps, or is to make."""
        return sum(part.num_in_making for part in self._making)

    def tier(self) -> Mapping[str, int]:
        """The places of a further tier of pages, if there is one, and how many are in each state."""
        return next(filter(None, (part.tier() for part in self.all)), {})

    @property
    def num_unfinished(self) -> int:
        """How much is still to be done before the process may end."""
        return sum(part.num_unfinished for part in self._finishing)

    def stats(self) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        return {part.stats_field: part.stats() for part in self.all if part.stats_field}
