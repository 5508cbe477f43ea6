"""The hooks of a policy: only the methods that it overrides are called. The others cost nothing."""

from collections.abc import Callable
from typing import TypeVar

from penstock.parts.policies.scheduler.policy import Policy

F = TypeVar("F", bound=Callable[..., object])


class Hooks:
    """The policy's own methods; None for those inherited from `Policy`."""

    __slots__ = ("longest_step_us", "may_join", "on_admitted", "on_finished", "on_gone", "on_step")

    def __init__(self, policy: Policy) -> None:
        def own(method: F, *names: str) -> F | None:
            return method if policy.overrides(method.__name__, *names) else None

        self.on_step = own(policy.on_step, "on_tokens")
        self.on_admitted = own(policy.on_admitted)
        self.on_finished = own(policy.on_finished)
        self.on_gone = own(policy.on_gone)
        self.may_join = own(policy.may_join)
        self.longest_step_us = own(policy.longest_step_us)
