"""The host tier in the scheduler's process."""

from penstock.parts.host.scheduler.host import Host

PARTS = (Host,)
