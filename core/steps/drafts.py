"""Drafts: positions that a decode computes beyond its own, at guesses of its next tokens, which the step verifies.

A part decides how many, and the worker makes the guesses. A decode with k drafts launches 1 + k positions and returns
0 to k + 1 tokens. Until its result is there, the scheduler assumes the maximum, and only the worker knows the row's
actual position:

    positions      0 ............ settled ............................ computed
                   [ KV is there  )[ token + k drafts )[ token + k'     )
                                   step i, in flight   step i + 1, planned for the latest possible start

The result of step i takes back the positions that got no token. The plan of step i + 1 has marked its start as a bound.
"""

from collections.abc import Sequence as ListOf
from typing import NamedTuple

from penstock.core.sequences.limits import PART_BESIDE_PROMPTS
from penstock.core.sequences.sequence import Sequence


class DraftRoom(NamedTuple):
    """What is known about the next step when its guesses are chosen."""

    num_tokens: int  # most guesses in all
    num_context: int  # sum of the decodes' positions
    has_prompts: bool = False  # whether it may compute a chunk of some prompt
    is_awaited: bool = False  # whether a step with guesses is in flight

    @classmethod
    def of_step(
        cls, num_tokens: int, num_rows: int, num_context: int, has_prompts: bool, is_awaited: bool
    ) -> "DraftRoom":
        """The room in a step of `num_tokens`: it keeps one token for each running row, and most room for prompts."""
        room = num_tokens - num_rows
        if has_prompts:
            room = min(room, num_tokens // PART_BESIDE_PROMPTS)
        return cls(room, num_context, has_prompts, is_awaited)


class DraftOutcome(NamedTuple):
    """What came of the drafts of a step, for each of its decodes in batch order."""

    seqs: ListOf[Sequence]
    num_allowed: ListOf[int]
    num_guessed: ListOf[int]  # at most as many as allowed
    num_tokens: ListOf[int]  # that each row returned: one more than its accepted guesses, or none
    num_context: int
    has_chunks: bool  # of prompts
    num_us: int  # the device's time for the whole step, and its wait for the plan; 0: unknown
    num_draft_us: int  # part of it that went into guessing

    @property
    def sums(self) -> tuple[int, int]:
        """How many tokens were guessed in all, and how many of them were right."""
        pairs = zip(self.num_guessed, self.num_tokens, strict=True)
        return sum(self.num_guessed), sum(max(0, num_tokens - 1) for guessed, num_tokens in pairs if guessed)


class DraftColumns(NamedTuple):
    """A plan's data about the drafts of its decodes."""

    counts: list[int]
    start_bounds: bytes  # 1 where the start is an upper bound
