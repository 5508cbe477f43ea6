"""The order of one scheduler's requests under a policy: their levels, and what the policy wants to know of them."""

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Self

from penstock.config import Config
from penstock.core.scheduling.part import Ending, SchedulerPart
from penstock.core.scheduling.step_record import Blocked
from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.steps.drafts import DraftOutcome
from penstock.core.steps.plan_builder import InFlightStep
from penstock.ipc.messages import StepResult
from penstock.parts.policies.options import FCFS, PolicyOptions
from penstock.parts.policies.scheduler.hooks import Hooks
from penstock.parts.policies.scheduler.levels import Levels
from penstock.parts.policies.scheduler.policy import Policy
from penstock.parts.policies.scheduler.registry import make_policy
from penstock.parts.policies.scheduler.view import View

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler


class Order(SchedulerPart):
    """Any order but first come, first served. It survives workers."""

    __slots__ = ("_hooks", "_requests", "_view", "_waiting", "levels", "policy")

    @classmethod
    def check_options(cls, config: Config) -> None:
        make_policy(config.of(PolicyOptions).scheduling_policy)

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self | None:
        name = scheduler.config.of(PolicyOptions).scheduling_policy
        if name == FCFS:
            return None
        if before is None:
            return cls(make_policy(name), scheduler)
        before._view.follow(scheduler.kv, scheduler.running, scheduler.limits)
        return before

    def __init__(self, policy: Policy, scheduler: "Scheduler") -> None:
        self.policy = policy
        policy.max_delay = scheduler.config.of(PolicyOptions).max_policy_delay or policy.max_delay
        if policy.overrides("first_tenant"):
            scheduler.waiting.order = policy
        if policy.overrides("key"):
            scheduler.pace.learn()
        self._requests = scheduler.requests
        self._waiting = scheduler.waiting
        self.levels = Levels(policy, scheduler.waiting)
        self._view = View(scheduler.options, scheduler.pace, self.levels.renew)
        self._view.follow(scheduler.kv, scheduler.running, scheduler.limits)
        self._hooks = Hooks(policy)
        policy.attach(self._view)

    # --- levels -----------------------------------------------------------------------------

    def arriving(self, request: Request, now: float) -> Refusal | None:
        return self.levels.arrived(request, now)

    def waits(self, request: Request) -> None:
        self.levels.waits(request, self._view.now)
        self.levels.returns(request)

    def expire(self) -> Iterator[Ending]:
        """Bring the order up to date; the requests that the policy refuses now must end."""
        if self.levels.advance(self._view.now, self._requests):
            self._waiting.note_new_order()
        return (Ending(request, refusal.reason, refusal.code) for request, refusal in self.levels.take_refused())

    def advance(self, *, is_idle: bool) -> Iterator[Ending]:
        return self.expire()

    def check_head(self) -> None:
        self.levels.check_head(self._view.now, self._view.running.num_left)

    # --- the policy's own methods -----------------------------------------------------------

    def why_not_join(self, request: Request) -> str:
        may_join = self._hooks.may_join
        return "" if may_join is None or may_join(request) else Blocked.TARGETS

    @property
    def longest_step_us(self) -> float:
        return inf if self._hooks.longest_step_us is None else self._hooks.longest_step_us()

    def entered(self, seq: Sequence, num_cached: int) -> int:
        if self._hooks.on_admitted is not None:
            num_tokens = seq.num_tokens - seq.num_computed_tokens if seq.num_cached_tokens < 0 else 0
            self._hooks.on_admitted(seq.request, num_tokens)
        self.levels.admitted(seq.request, self._view.now)
        return num_cached

    def stepped(self, step: InFlightStep, result: StepResult, outcome: DraftOutcome | None) -> None:
        if self._hooks.on_step is not None:
            self._hooks.on_step(step)

    def finished(self, request: Request, num_outputs: int) -> None:
        if self._hooks.on_finished is not None:
            self._hooks.on_finished(request, num_outputs)

    def leave(self, request: Request) -> None:
        if self._hooks.on_gone is not None and not request.is_live:  # otherwise it is paused
            self._hooks.on_gone(request)

    def check(self, scheduler: "Scheduler") -> Iterator[tuple[bool, str]]:
        for request in scheduler.requests.values():
            if request.waiting and not request.is_paused and not request.is_overdue:
                yield request.waits_since is not None, "the time that a request waits is counted"
                yield self.levels.will_be_overdue(request), "a request is looked at again in time"
