"""The disk tier in the scheduler's process."""

from penstock.parts.disk.scheduler.moves import DiskMoves

PARTS = (DiskMoves,)
