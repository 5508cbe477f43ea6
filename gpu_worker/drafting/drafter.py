"""The interface of drafters: they guess tokens that a row will have, which the next step of the model verifies.

A drafter never decides what a row's tokens are. So it may be wrong, or guess nothing: that costs time only.
All ranks of a group must guess the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.gpu_worker.devices.device import Graphs
from penstock.ipc.messages import StepPlan

Int32Array = npt.NDArray[np.int32]


class Guesses(NamedTuple):
    """For each of D rows, the tokens that may come next."""

    counts: Int32Array  # [D]
    token_ids: Int32Array  # [sum(counts)]
    parents: Int32Array | None = None
    """[sum(counts)], if some rows have trees: which guess of the same row a guess follows, by its number there; -1: the
    row's last token. Parents come before their children; of those, the likeliest first. None: each follows the one
    before it."""


class Traits(NamedTuple):
    """What kind of drafter one is."""

    guesses_trees: bool = False
    """Whether guesses may have parents."""

    wants_hidden: bool = False
    """Whether `computed` gets hidden states."""

    num_taps: int = 0
    """What it gets in place of the final ones: what comes to so many layers, which it has asked for by `Model.tap`."""

    guesses_ahead: bool = False
    """Whether it can guess what follows tokens that the model has not computed yet: those that a grammar forces. Its
    guesses for a row with a grammar may be cut, and forced tokens follow them."""

    wants_ended: bool = False
    """Whether `ended` is called."""

    writes_tokens: bool = False
    """Whether what it guesses is in the rows' tokens on the device already."""


class Drafter(ABC):
    """The base of all: what a drafter has no use for, it leaves out."""

    traits = Traits()

    def ended(self, rows: Int32Array, ends: Int32Array) -> None:
        """The sequences of int32[F] rows leave them; the host knows their first `ends[i]` tokens. Before `apply`."""

    def apply(self, plan: StepPlan) -> None:
        """What a plan changes of rows and pages: before `guess` and `computed` for this plan."""

    @abstractmethod
    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """Guess the tokens of D rows.

        Args:
            rows: int32[D].
            positions: int32[D], of each row's last token: guesses are for the positions after it. Their keys and values
                may be written to the row's pages, which are there.
            most: int32[D], how many may be guessed.
        """

    def computed(self, rows: Int32Array, start: Int32Array, num_new: Int32Array, hidden: Tensor | None) -> None:
        """The model has computed a batch, as the device knows; of the guesses in it, nobody knows yet which are right.

        Args:
            rows: int32[N], each once or, with drafts, once for each position.
            start: int32[N], their first positions; of nodes of a tree their places (`gpu_worker/steps/trees.py`).
            num_new: int32[N], how many each has computed (T in all).
            hidden: [T, H], the final ones, normed, or [T, num_taps * H], if the drafter wants them; they may be
                overwritten later.
        """

    def capture(self, graphs: Graphs) -> None:
        """Record what it launches in every step, if that can be recorded. The dummy row has its page."""

    def warm_up(self, contexts: Sequence[int]) -> None:
        """Launch what guessing launches, at these lengths of a sequence; no row is in use."""

    def take_error(self) -> str:
        """Why it guesses nothing from now on, if it has failed since the last call; empty: it has not."""
        return ""

    def moved(self, rows: Int32Array, sources: Int32Array, targets: Int32Array) -> None:
        """What was computed at places of trees has become the right positions of rows; int32[M] each, all at once."""

    def clear(self) -> None:
        """Forget all rows."""
