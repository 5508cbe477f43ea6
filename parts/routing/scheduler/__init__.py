"""What frontends that choose among engines are told by the scheduler's process."""

from penstock.parts.routing.scheduler.news import Routing

PARTS = (Routing,)
