"""Small sums: every pair of small numbers, in many words."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

_ASK = (
    "What is {a} {w} {b}?", "{a} {o} {b}", "{a}{o}{b}", "How much is {a} {w} {b}?", "Calculate {a} {o} {b}.",
    "What is {a} {o} {b}?", "{a} {w} {b}?", "Compute {a} {w} {b}.", "What do you get for {a} {o} {b}?",
    "Can you work out {a} {w} {b}?", "{a} {o} {b} = ?", "Tell me what {a} {w} {b} is.",
)  # fmt: skip
_OPERATIONS = (("plus", "+"), ("minus", "-"), ("times", "*"))


@dataclass(frozen=True, slots=True)
class Sum:
    """One question, its answer, and the number that a right answer contains."""

    question: str
    answer: str
    expected: str
    held_out: bool


def small_sums() -> Iterator[Sum]:
    """Sums and differences up to 20 and products up to 10 x 10; a tenth of the questions is held out."""
    for word, sign in _OPERATIONS:
        top = 10 if sign == "*" else 20
        for a in range(top + 1):
            for b in range(top + 1):
                if sign == "-" and b > a:
                    continue
                result = {"+": a + b, "-": a - b, "*": a * b}[sign]
                for ask in _ASK:
                    question = ask.format(a=a, b=b, w=word, o=sign)
                    # Without its punctuation "1 + 2 = ?" is "1 + 2": both are always trained, so neither leaks.
                    may_hold_out = ask not in ("{a} {o} {b}", "{a} {o} {b} = ?")
                    chosen = may_hold_out and hashlib.sha256(question.encode()).digest()[0] < 26
                    yield Sum(question, f"{a} {word} {b} is {result}.", f"is {result}.", chosen)
