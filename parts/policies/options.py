"""Options of policies."""

from typing import Annotated, ClassVar

from msgspec import Meta

from penstock.config.groups.base import INTERNAL, Shown
from penstock.config.part_options import PartOptions

FCFS = "fcfs"
"""The order that schedulers have by themselves."""


class PolicyOptions(PartOptions, frozen=True):
    """Who comes first ([scheduling](scheduling.md))."""

    part: ClassVar[str] = "policies"
    title: ClassVar[str] = "Order of requests"
    beside: ClassVar[str] = "scheduler"

    scheduling_policy: Annotated[
        str,
        Meta(
            description="Order of waiting requests (docs/scheduling.md): 'fcfs' by arrival, 'priority' by the "
            "request's priority, 'sjf' the least predicted work, 'hrrn' the highest response ratio, 'cache-aware' the "
            "longest cached prefix, 'fair' the tenant that has had the fewest tokens, 'deadline' the least slack to "
            "the request's targets ('deadline-refuse' also refuses those that cannot meet them), or MODULE:CLASS, a "
            "policy of your own."
        ),
        Shown("NAME", "priority, sjf, fair, ..., or MODULE:CLASS"),
    ] = FCFS
    max_policy_delay: Annotated[
        float,
        Meta(
            description="A request that has waited this many seconds comes before all that have waited for less, "
            "whatever the policy; such requests take turns as under fcfs. 0: the policy's own `max_delay`.",
            ge=0.0,
        ),
        INTERNAL,
    ] = 0.0


PARTS = (PolicyOptions,)
