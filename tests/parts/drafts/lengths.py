"""The part of a scheduler that decides how many tokens are drafted."""

from dataclasses import replace

from penstock.core.scheduling.scheduler import Scheduler
from penstock.parts.drafts.scheduler.drafting import Drafting
from penstock.parts.drafts.scheduler.lengths import FixedLengths


def drafting_of(scheduler: Scheduler | None) -> Drafting:
    """It is there if the scheduler's worker has a drafter."""
    assert scheduler is not None
    found = scheduler.parts.get(Drafting)
    assert found is not None
    return found


def draft_always(scheduler: Scheduler, num_drafts: int) -> None:
    """Let so many tokens be drafted in every step, by a worker that has got its drafter after its hello."""
    scheduler.limits = replace(scheduler.limits, max_drafts=num_drafts, drafter="of a test")
    scheduler.reset_worker(has_died=False)
    drafting_of(scheduler).lengths = FixedLengths(num_drafts)
