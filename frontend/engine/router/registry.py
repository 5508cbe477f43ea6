"""The routing policies, by their names in `--routing`."""

from collections.abc import Callable
from random import Random

from penstock.frontend.engine.router.least_loaded import LeastLoaded
from penstock.frontend.engine.router.policy import Policy
from penstock.frontend.engine.router.prefix import PrefixAffinity
from penstock.frontend.engine.router.round_robin import RoundRobin

POLICIES: dict[str, Callable[[Random], Policy]] = {
    "prefix": PrefixAffinity,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}
