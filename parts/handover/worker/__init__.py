"""KV pages that workers of other engines read from this one, and pages that this one reads from them."""

from penstock.parts.handover.worker.handover import Handover

PARTS = (Handover,)
