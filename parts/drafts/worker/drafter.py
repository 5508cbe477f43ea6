"""The interface of drafters: they guess a row's next tokens, and the next step of the model verifies the guesses.

A drafter never decides what a row's tokens are. A wrong or a missing guess costs only time.
All ranks of a group must make the same guesses.
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
Int64Array = npt.NDArray[np.int64]


class Guesses(NamedTuple):
    """For each of D rows, the tokens that may come next."""

    counts: Int32Array  # [D]
    token_ids: Int32Array  # [sum(counts)]
    parents: Int32Array | None = None
    """[sum(counts)], if some rows have trees: the index in its row of the guess that each guess follows, or -1 for the
    row's last token. Parents come before their children, and likelier children before others. None: each guess follows
    the one before it."""


class Traits(NamedTuple):
    """What a drafter needs and can do."""

    guesses_trees: bool = False
    """Whether guesses may have parents."""

    wants_hidden: bool = False
    """Whether `computed` gets hidden states."""

    num_taps: int = 0
    """If not 0, `computed` gets the inputs of this many layers in place of the final hidden states
    (`HandsOutLayers.tap`)."""

    guesses_ahead: bool = False
    """Whether it can guess what follows tokens that the model has not computed yet, such as those that a grammar
    forces. Its guesses for a row with a grammar may be cut, and forced tokens may follow them."""

    wants_ended: bool = False
    """Whether `ended` is called."""

    writes_tokens: bool = False
    """Whether it writes its guesses to the rows' tokens on the device itself."""


class Drafter(ABC):
    """The base class of drafters. A drafter overrides only the methods that it needs."""

    traits = Traits()

    def ended(self, rows: Int32Array, ends: Int32Array) -> None:
        """Sequences leave rows, int32[F]; the host knows their first `ends[i]` tokens. Called before `apply`."""

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's changes to rows and pages. Called before `guess` and `computed` for this plan."""

    @abstractmethod
    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """Guess the tokens of D rows.

        Args:
            rows: int32[D].
            positions: int32[D], of each row's last token. The guesses are for the positions after it. Their keys and
                values may be written to the row's pages, which are allocated.
            most: int32[D], the most guesses for each row.
        """

    def computed(self, rows: Int32Array, start: Int32Array, num_new: Int32Array, hidden: Tensor | None) -> None:
        """The model has computed a batch. The host does not know yet which of its guesses are right.

        Args:
            rows: int32[N], each once or, with drafts, once for each position.
            start: int32[N], their first positions; for nodes of a tree, their places (`parts/drafts/worker/trees.py`).
            num_new: int32[N], how many positions each row has computed (T in all).
            hidden: if the drafter wants them, the final hidden states after the norm, [T, H], or the tapped ones,
                [T, num_taps * H]; they may be overwritten later.
        """

    def capture(self, graphs: Graphs) -> None:
        """Capture what it launches in every step, if that can be captured. The dummy row has its page by now."""

    def warm_up(self, contexts: Sequence[int]) -> None:
        """Launch all kernels of guessing, at these lengths of a sequence; no row is in use."""

    def take_error(self) -> str:
        """If it has failed since the last call, why it guesses nothing from now on; else empty."""
        return ""

    def moved(self, rows: Int32Array, sources: Int32Array, targets: Int32Array) -> None:
        """Right paths of trees have been moved from places to positions; int32[M] each, moved all at once."""

    def clear(self) -> None:
        """Forget all rows."""
