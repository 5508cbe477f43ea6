"""Few cases in which any two settings meet: most defects need no more than two to show."""

from itertools import combinations, product
from typing import Any

from tests.faults.soak import IS_SOAK


def every(*axes: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """All rows with a value of each axis in soak, else pairs."""
    return list(product(*axes)) if IS_SOAK else pairwise(*axes)


def pairwise(*axes: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Rows with a value of each axis, such that every two values of different axes are together in some row.

    Greedy: of all rows, the next one is the first that has most pairs which no row has yet.
    """
    everything = list(product(*axes))

    def pairs(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return set(combinations(enumerate(row), 2))

    left = set().union(*map(pairs, everything))
    chosen = []
    while left:
        best = max(everything, key=lambda row: len(left & pairs(row)))
        chosen.append(best)
        left -= pairs(best)
    return chosen
