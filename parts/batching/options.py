"""Options of batching."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from penstock.config.groups.base import INTERNAL
from penstock.config.part_options import PartOptions

BatchingName = Literal["continuous", "static", "dynamic", "length-aware"]


class BatchingOptions(PartOptions, frozen=True):
    """When waiting sequences begin ([scheduling](scheduling.md#batching-kinds))."""

    part: ClassVar[str] = "batching"
    title: ClassVar[str] = "Batching"
    beside: ClassVar[str] = "scheduler"

    batching: Annotated[
        BatchingName,
        Meta(
            description="When waiting sequences begin: 'continuous' as soon as there is room; 'static' in batches, the "
            "next one when the last sequence of a batch has ended; 'dynamic' as static, but a batch begins only when "
            "it is full or its first request has waited for 0.1 seconds; 'length-aware' as static, with sequences "
            "whose outputs are predicted to be of about the same length."
        ),
    ] = "continuous"
    batch_wait_ms: Annotated[
        int,
        Meta(
            description="Longest wait for a full batch, in milliseconds, from its first request on, if batching is "
            "dynamic: who asks hardly notices it, and a burst arrives in it.",
            ge=0,
        ),
        INTERNAL,
    ] = 100


PARTS = (BatchingOptions,)
