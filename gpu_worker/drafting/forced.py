"""No guesses but those that come from grammars anyway: the tokens that a grammar forces (jump-forward)."""

import numpy as np

from penstock.gpu_worker.drafting.drafter import Drafter, Guesses, Int32Array


class OnlyForced(Drafter):
    """For those who want the tokens that grammars force, and no other guesses."""

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """See `Drafter`."""
        return Guesses(np.zeros_like(most), most[:0])
