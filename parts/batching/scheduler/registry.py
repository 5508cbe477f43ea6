"""The batching kinds, by their names in `--batching`."""

from collections.abc import Callable

from penstock.parts.batching.options import BatchingName, BatchingOptions
from penstock.parts.batching.scheduler.dynamic import Dynamic
from penstock.parts.batching.scheduler.length_aware import LengthAware
from penstock.parts.batching.scheduler.static import Static

KINDS: dict[BatchingName, Callable[[BatchingOptions], Static] | None] = {
    "continuous": None,  # no batches: a sequence begins when there is room
    "static": Static,
    "dynamic": Dynamic,
    "length-aware": LengthAware,
}


def make_batching(options: BatchingOptions) -> Static | None:
    """Return the kind that the options name; None if sequences begin one by one."""
    make = KINDS[options.batching]
    return None if make is None else make(options)
