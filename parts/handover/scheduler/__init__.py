"""What the scheduler's process does for disaggregated prefill."""

from penstock.parts.handover.scheduler.handovers import Handovers
from penstock.parts.handover.scheduler.roles import Roles

PARTS = (Handovers, Roles)
