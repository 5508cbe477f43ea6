"""The outcome of computing a sequence again."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

Verdict = Literal["equal", "differs", "skipped"]


class Outcome(Struct, frozen=True, omit_defaults=True):
    """One sequence, or a whole request that could not be computed again (then `seq` is -1)."""

    id: str
    seq: int
    verdict: Verdict
    num_tokens: int = 0  # how many were compared
    position: int = -1  # of the first token that differs
    expected: int | None = None  # the recorded token there; None: the recorded output ends before
    got: int | None = None  # the new token there; None: the new output ends before
    why: str = ""

    @property
    def sentence(self) -> str:
        """For people."""
        name = self.id if self.seq <= 0 else f"{self.id} sequence {self.seq}"
        if self.verdict == "skipped":
            return f"skipped  {name}: {self.why}"
        if self.verdict == "equal":
            return f"equal    {name}: {self.num_tokens} tokens" + (f", {self.why}" if self.why else "")
        if self.position < 0:
            return f"differs  {name}: {self.why}"
        was = "the end" if self.expected is None else f"token {self.expected}"
        now = "the end" if self.got is None else f"token {self.got}"
        return f"differs  {name}: at position {self.position} of {self.num_tokens} there was {was}, and is {now}"


Name = tuple[str, int]
"""A request's id, and the sequence in it."""


class StepOutcome(Struct, frozen=True, omit_defaults=True):
    """A step that was computed again."""

    step: int
    num_tokens: int
    name: Name | None = None  # the first sequence with a different token; None: all are equal
    expected: int | None = None
    got: int | None = None

    @property
    def sentence(self) -> str:
        """For people."""
        if self.name is None:
            return f"equal    step {self.step}: {self.num_tokens} tokens"
        name = f"{self.name[0]} sequence {self.name[1]}" if self.name[1] else self.name[0]
        return f"differs  step {self.step}: {name} got token {self.expected} there, and gets {self.got}"


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int:
    """The first position at which they differ, which may be the end of the shorter one; -1 if they are equal."""
    for position, (was, now) in enumerate(zip(expected, got, strict=False)):
        if was != now:
            return position
    return -1 if len(expected) == len(got) else min(len(expected), len(got))
