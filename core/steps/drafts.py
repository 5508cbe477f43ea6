"""Drafts: guesses of a sequence's next tokens, which one step verifies together.

A decode with k drafts launches 1 + k positions and brings 0 to k + 1 tokens. Until its result is there, the scheduler
counts the most, and the worker alone knows where the row stands:

    positions      0 ............ settled ............................ computed
                   [ KV is there  )[ token + k drafts )[ token + k'     )
                                   step i, in flight   step i + 1, planned at the most that it can start at

The result of step i takes back what it did not bring; the start of step i + 1 was a bound then, and the plan said so.
"""

from collections.abc import Sequence as ListOf
from typing import NamedTuple, Protocol

from penstock.core.sequences.sequence import Sequence


class Drafter(Protocol):
    """Who guesses."""

    def draft(self, seq: Sequence) -> ListOf[int]:
        """Return guesses of the tokens at positions `seq.num_computed_tokens` and after, as many as it likes.

        Known are `seq.token_ids`, which end before that position while steps are in flight. A wrong guess costs time
        alone.
        """


class Drafts(NamedTuple):
    """What a plan says of the drafts of its decodes."""

    counts: list[int]
    token_ids: list[int]  # of all decodes, in batch order
    start_bounds: bytes  # 1 where the start is the most that it can be
