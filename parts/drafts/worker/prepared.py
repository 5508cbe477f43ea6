"""What a drafter is made from, once the model has rows and pages."""

from collections.abc import Callable
from typing import NamedTuple

from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.ahead import Computed
from penstock.parts.drafts.worker.drafter import Drafter


class Prepared(NamedTuple):
    """A drafter with its weights loaded."""

    make: Callable[[int, RowState], Drafter]  # from the number of pages, and the rows
    page_bytes: int = 0
    """Bytes that it keeps for each page of the model, in a page with the same number."""
    computed: Computed | None = None
    """A model of the drafter that computes batches as large as the target's, so its activations need memory, too."""
    row_bytes: int = 0
    """Bytes that it keeps for each row."""
