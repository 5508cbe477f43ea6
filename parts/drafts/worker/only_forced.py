"""No guesses except the tokens that a grammar forces (jump-forward), which need no drafter."""

import numpy as np

from penstock.parts.drafts.worker.drafter import Drafter, Guesses, Int32Array


class OnlyForced(Drafter):
    """Guesses nothing itself, so that only forced tokens are guessed."""

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """See `Drafter`."""
        return Guesses(np.zeros_like(most), most[:0])
