"""Policies: the order of requests. Your own class is used with `--scheduling-policy MODULE:CLASS`.

A request with a smaller key runs first. Requests with equal keys form a level, in which tenants, groups and requests
take turns (`waiting_queue.py`). A policy has no clock of its own: callers pass the time.
"""

import importlib
from collections.abc import Callable, Iterable
from operator import attrgetter

from penstock.core.config import ConfigError
from penstock.core.sequences.sequence import Key, Request, Sequence

_by_order = attrgetter("order")


class Policy:
    """First come, first served; the base of all policies. Each scheduler creates its own, which may keep state."""

    preempts = False
    """Whether a waiting sequence takes the row of a running one that has a greater key."""

    changes = False
    """Whether keys change with time or with computed tokens. Then they are computed again before each step, at a cost
    that grows with the number of live requests; otherwise once, when a request arrives."""

    def key(self, request: Request, now: float) -> Key:
        """Return the request's key: smaller runs first. `now`: seconds of a monotonic clock."""
        return ()

    def on_tokens(self, request: Request, num_tokens: int) -> None:
        """Called after this many positions of the request have been computed, but only if keys change."""

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Return the running sequence (there is at least one) to preempt when pages or rows run out."""
        return max(running, key=_by_order)


class Priority(Policy):
    """By the request's own priority, then by arrival."""

    preempts = True

    def key(self, request: Request, now: float) -> Key:
        return (request.priority,)


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Policy, "priority": Priority}
"""By name. A module imported in the scheduler's process may add to it."""


def make_policy(name: str) -> Policy:
    """Return a new policy: one of POLICIES, or an instance of the class that `MODULE:CLASS` names.

    Raises:
        ConfigError: if there is no such policy.
    """
    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.partition(":")
    try:
        policy = getattr(importlib.import_module(module), attribute)() if module and attribute else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--scheduling-policy {name}: {error}") from None
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"--scheduling-policy must be {', '.join(POLICIES)} or MODULE:CLASS of a Policy, got {name!r}"
        )
    return policy
