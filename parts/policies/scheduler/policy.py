"""The base class of policies. `--scheduling-policy MODULE:CLASS` uses a class of your own (`registry.py`).

A request with a smaller key runs first. Requests with equal keys form a level, in which tenants, groups and requests
take turns (`core/sequences/waiting_queue.py`). A policy has no clock of its own: callers pass the time.

What the scheduler itself asks of an order is in `core/scheduling/policy.py`. Which methods a class overrides is checked
once; the others are never called.
"""

from collections.abc import Collection
from math import inf

from penstock.core.scheduling.policy import Policy as FirstCome
from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.sequence import Key, Request
from penstock.core.steps.plan_builder import InFlightStep
from penstock.parts.policies.scheduler.view import View


class Policy(FirstCome):
    """First come, first served, until a method is overridden. Each scheduler creates its own, which may keep state.

    The bound of fcfs: between two turns of a tenant, each other tenant has one. The same holds for a tenant's groups.
    """

    max_delay = inf
    """Total seconds of waiting after which a request comes before all that have waited for less; such requests go in
    turns, as under fcfs. So no request starves, whatever a policy's keys are."""

    checks_head = False
    """Whether the key of the head of the queue is recomputed before it gets a row, because it may have changed."""

    changes = False
    """Whether all keys are recomputed before each step, at a cost that grows with the number of live requests.
    `renews_at` and `View.renew` are cheaper."""

    view: View

    def attach(self, view: View) -> None:
        """Called once, before everything else, with what the policy may see of its scheduler."""
        self.view = view

    def key(self, request: Request, now: float) -> Key:
        """Return the request's key, which is not empty: smaller runs first. `now`: seconds of a monotonic clock.

        Called when a request arrives, at the time that `renews_at` returned, and some steps after `View.renew`.
        """
        return ()

    def renews_at(self, request: Request, now: float) -> float:
        """Return when the key must be recomputed. Called after `key`, while the request waits."""
        return inf

    def refusal(self, request: Request, now: float) -> Refusal | None:
        """Return why a request must not be served. Called before `key`, for requests that never had a row."""
        return None

    def may_join(self, request: Request) -> bool:
        """Return whether the head of the queue may join the running requests. Not called for those behind it."""
        return True

    def longest_step_us(self) -> float:
        """Return the longest time, in microseconds, for a step that computes prompts beside decodes."""
        return inf

    def on_tokens(self, request: Request, num_tokens: int) -> None:
        """Called for each request of each step, after this many of its positions have been computed."""

    def on_step(self, step: InFlightStep) -> None:
        """Called once for each step that has returned. A policy that needs only sums overrides this instead."""
        for seq, num_tokens in zip(step.decodes.seqs, step.decode_sizes, strict=True):
            self.on_tokens(seq.request, num_tokens)
        for chunk in step.chunks:
            self.on_tokens(chunk.seq.request, chunk.num_new)

    def on_admitted(self, request: Request, num_tokens: int) -> None:
        """Called when a sequence of the request gets a row.

        `num_tokens`: tokens to compute before its first output; 0 if it had a row before.
        """

    def on_finished(self, request: Request, num_outputs: int) -> None:
        """Called when a sequence of the request that had a row has ended with `num_outputs` tokens of output."""

    def on_gone(self, request: Request) -> None:
        """Called when a request has left the scheduler, for any reason: drop the state kept for it."""

    def first_tenant(self, tenants: Collection[str]) -> str:
        """Return which of these tenants, which have new sequences on one level, is next. By default they take turns.

        Called once or a few times per step, so it must be O(1), or nearly.
        """
        return next(iter(tenants))

    def tenant_waits(self, tenant: str, tenants: Collection[str]) -> None:
        """Called when a tenant joins those on a level (`tenants` excludes it), before `first_tenant` sees it."""

    def overrides(self, *methods: str) -> bool:
        """Return whether the class overrides one of these methods."""
        return any(getattr(type(self), name) is not getattr(Policy, name) for name in methods)
