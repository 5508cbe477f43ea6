"""KV pages that go from engine to engine, in a worker."""

from penstock.gpu_worker.handover.handover import Handover

PARTS = (Handover,)
