"""Random traces under each policy: outputs are those of the solo run; pages, rows and levels are exact throughout."""

import pytest

from penstock.parts.policies.scheduler.registry import POLICIES
from tests.core.scheduling.test_scheduler_traces import random_limits, random_requests, random_trace
from tests.faults.soak import IS_SOAK
from tests.parts.host.test_host_moves import KINDS, returning_requests, with_host

NUM_SEEDS = 120 if IS_SOAK else 6
OWN = [name for name in POLICIES if name != "fcfs"]


def trace(seed: int, policy: str) -> None:
    """Every second one with pages on the host."""
    has_host = seed % 2 == 1
    limits = with_host(random_limits) if has_host else random_limits
    make_requests = returning_requests if has_host else random_requests
    random_trace(
        seed, limits, make_requests=make_requests, seconds_per_call=0.02, scheduling_policy=policy,
        max_policy_delay=2.0, preemption=KINDS[seed // 2 % 3] if has_host else "recompute",
    )  # fmt: skip


@pytest.mark.parametrize("policy", OWN)
def test_every_sequence_has_its_solo_output(policy: str) -> None:
    """With aborts, deaths of workers and schedulers, time that makes requests overdue, and pages on the host."""
    for seed in range(NUM_SEEDS):
        try:
            trace(seed, policy)
        except BaseException as error:
            error.add_note(f"trace of seed {seed}")
            raise
