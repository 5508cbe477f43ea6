"""Drafts: guesses of a sequence's next tokens, which one step verifies together.

A decode with k drafts launches 1 + k positions and returns 0 to k + 1 tokens. Until its result is there, the scheduler
assumes the maximum, and only the worker knows the row's actual position:

    positions      0 ............ settled ............................ computed
                   [ KV is there  )[ token + k drafts )[ token + k'     )
                                   step i, in flight   step i + 1, planned for the latest possible start

The result of step i takes back the positions without a token; the start of step i + 1 was marked as a bound in its
plan.
"""

from collections.abc import Sequence as ListOf
from typing import NamedTuple, Protocol

from penstock.core.sequences.sequence import Sequence


class Drafter(Protocol):
    """Who guesses."""

    def draft(self, seq: Sequence) -> ListOf[int]:
        """Return guesses of the tokens from position `seq.num_computed_tokens` on, any number of them.

        `seq.token_ids` are known; while steps are in flight they end before that position. A wrong guess only costs
        time.
        """


class Drafts(NamedTuple):
    """A plan's data about the drafts of its decodes."""

    counts: list[int]
    token_ids: list[int]  # of all decodes, in batch order
    start_bounds: bytes  # 1 where the start is an upper bound
