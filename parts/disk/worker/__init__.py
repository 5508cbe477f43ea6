"""KV pages in files, which survive the process."""

from penstock.parts.disk.worker.tier import DiskTier

PARTS = (DiskTier,)
