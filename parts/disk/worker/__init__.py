"""KV pages in files, in a worker."""

from penstock.gpu_worker.disk.tier import DiskTier

PARTS = (DiskTier,)
