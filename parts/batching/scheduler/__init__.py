"""Batches in the scheduler's process."""

from penstock.parts.batching.scheduler.batches import Batches

PARTS = (Batches,)
