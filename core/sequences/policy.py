"""Policies: which request comes before which. A class of your own joins them as `--scheduling-policy MODULE:CLASS`.

A request with a smaller key runs first; requests with equal keys form a level, in which tenants, groups and requests
have their turns (`waiting_queue.py`). A policy has no clock of its own: whoever asks it says what time it is.
"""

import importlib
from collections.abc import Callable, Iterable
from operator import attrgetter

from penstock.core.config import ConfigError
from penstock.core.sequences.sequence import Key, Request, Sequence

_by_order = attrgetter("order")


class Policy:
    """First come, first served; the base of all policies. A scheduler makes one for itself, which may keep state."""

    preempts = False
    """Whether a waiting sequence takes the row of a running one whose key is greater."""

    changes = False
    """Whether keys change with time or with computed tokens. They are then asked for again before each step, at a cost
    that grows with the number of live requests; otherwise once, when a request comes."""

    def key(self, request: Request, now: float) -> Key:
        """Return where the request stands among all: smaller runs first. `now`: seconds, by a monotonic clock."""
        return ()

    def on_tokens(self, request: Request, num_tokens: int) -> None:
        """So many positions of the request have been computed. Called only if keys change."""

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Return the one of the running sequences (at least one) that is preempted when pages or rows run out."""
        return max(running, key=_by_order)


class Priority(Policy):
    """By the request's own priority, then as it came."""

    preempts = True

    def key(self, request: Request, now: float) -> Key:
        return (request.priority,)


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Policy, "priority": Priority}
"""By name. A module that is imported in the scheduler's process may add to it."""


def make_policy(name: str) -> Policy:
    """Return a new policy: one of POLICIES, or of a class that `MODULE:CLASS` names.

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
