"""A drafter that knows what comes, and makes mistakes now and then."""

from itertools import chain
from random import Random

import numpy as np

from penstock.gpu_worker.state.row_state import RowState
from penstock.parts.drafts.worker.drafter import Drafter, Guesses, Int32Array, Traits


class Remembered(Drafter):
    """Guesses what came in an earlier run; whose tokens a row has is seen from those that are known.

    All that were made with the same texts guess the same.
    """

    max_drafts = 3

    def __init__(self, texts: list[list[int]], state: RowState) -> None:
        self._texts = texts
        self._state = state

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """See `Drafter`."""
        found = [
            self._of(row, *each) for row, *each in zip(rows.tolist(), positions.tolist(), most.tolist(), strict=True)
        ]
        return Guesses(np.array([*map(len, found)], dtype=np.int32), np.array([*chain(*found)], dtype=np.int32))

    def _of(self, row: int, position: int, most: int) -> list[int]:
        known = self._state.host_tokens(row)[: position + 1].tolist()
        text = next((each for each in self._texts if each[: len(known)] == known), known)
        rng = Random(1000 * row + position)
        tokens = text[position + 1 :][: rng.randint(0, most)]
        return [token if rng.random() < 0.8 else rng.randrange(60) for token in tokens]


class RememberedTrees(Remembered):
    """The same in trees: the right tokens somewhere among wrong ones, which also follow them, and have children."""

    traits = Traits(guesses_trees=True)
    max_drafts = 9

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """See `Drafter`."""
        trees = [
            self._tree(row, *each) for row, *each in zip(rows.tolist(), positions.tolist(), most.tolist(), strict=True)
        ]
        counts = np.array([*map(len, trees)], dtype=np.int32)
        nodes = np.array([*chain(*trees)], dtype=np.int32).reshape(-1, 2)
        return Guesses(counts, nodes[:, 0].copy(), nodes[:, 1].copy())

    def _tree(self, row: int, position: int, most: int) -> list[tuple[int, int]]:
        """(token, parent) of each node."""
        right = self._of(row, position, most // 2)
        rng = Random(1000 * row + position)
        nodes: list[tuple[int, int]] = []
        last, num_right = -1, 0
        while len(nodes) < most - len(right) + num_right and rng.random() < 0.95:
            if num_right < len(right) and rng.random() < 0.5:
                nodes.append((right[num_right], last))
                last, num_right = len(nodes) - 1, num_right + 1
            else:
                parent = rng.choice([last, rng.randrange(-1, len(nodes))])
                token = rng.randrange(60)
                if (token, parent) not in nodes and (parent != last or token not in right[num_right:][:1]):
                    nodes.append((token, parent))
        return nodes
