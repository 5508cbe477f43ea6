"""How long a step takes, learned from the steps' times on this machine.

    microseconds = w0 + w1 rows that decode + w2 tokens in their contexts + w3 prompt tokens + w4 (token, context) pairs

The last part is what makes a chunk dearer the further it stands in its prompt: each of its tokens looks at all before
it. The weights are least squares over the latest steps, none of them negative; older steps count less and less.
"""

from math import sqrt

_SCALES = (1.0, 1 / 64, 1 / 65536, 1 / 256, 1 / 262144)
"""They bring the parts of usual steps to the size of one."""

_FORGETTING = 0.97
_RIDGE = 1e-3
_NUM_SWEEPS = 4
_MAX_SURPRISE = 3.0
"""A step that takes many times as long as was thought tells of something else: a stopped process, a page that was read
from disk. It counts as this many times as long."""

_NUM_FIRST = 4
"""So many steps are believed whatever they took."""

Parts = tuple[float, float, float, float, float]


def parts_of(num_decodes: int, num_context_tokens: int, chunks: list[tuple[int, int]]) -> Parts:
    """Return what the weights are for; `chunks` are (start, number of tokens)."""
    num_tokens = sum(num_new for _, num_new in chunks)
    num_pairs = sum(num_new * (start + num_new / 2) for start, num_new in chunks)
    one, rows, context, tokens, pairs = _SCALES
    return one, num_decodes * rows, num_context_tokens * context, num_tokens * tokens, num_pairs * pairs


class StepTime:
    """The weights. `learn` costs some ten microseconds: for steps with prompts, and a few others."""

    __slots__ = ("_num_learned", "_products", "_targets", "_weights")

    def __init__(self) -> None:
        size = len(_SCALES)
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._weights = [0.0] * size
        self._num_learned = 0

    @property
    def is_known(self) -> bool:
        """Enough steps have been seen to believe it."""
        return self._num_learned >= _NUM_FIRST

    def learn(self, parts: Parts, num_us: float) -> None:
        """A step with these parts took so long."""
        expected = num_us
        if self.is_known:
            expected = max(self.predict(parts), 1.0)
            num_us = min(num_us, _MAX_SURPRISE * expected)
        self._num_learned += 1
        # An error counts by its share, so that a long step does not outweigh many short ones. Its share of what was
        # expected: of what it took, the quick ones among equal steps would count for more.
        weight = 1 / max(expected, 1.0) ** 2
        for i, row in enumerate(self._products):
            part = parts[i] * weight
            self._targets[i] = self._targets[i] * _FORGETTING + part * num_us
            for j, other in enumerate(parts):
                row[j] = row[j] * _FORGETTING + part * other
        self._solve()

    def _solve(self) -> None:
        """Gauss and Seidel's steps from the weights of before, each held at zero or more."""
        weights, ridge = self._weights, _RIDGE * max(self._products[i][i] for i in range(len(_SCALES)))
        for _ in range(_NUM_SWEEPS):
            for i, row in enumerate(self._products):
                if row[i] <= 0:
                    continue
                others = sum(row[j] * weights[j] for j in range(len(row))) - row[i] * weights[i]
                # The ridge pulls to the weight of before: what the latest steps do not tell stays as it was.
                weights[i] = max(0.0, (self._targets[i] - others + ridge * weights[i]) / (row[i] + ridge))

    def predict(self, parts: Parts) -> float:
        """Return the microseconds of a step with these parts."""
        return sum(weight * part for weight, part in zip(self._weights, parts, strict=True))

    def tokens_within(self, num_us: float, start: int) -> int:
        """Return how many tokens from position `start` on a chunk may have to add no more than this to a step."""
        per_pair = self._weights[4] * _SCALES[4]
        per_token = self._weights[3] * _SCALES[3] + per_pair * start
        if num_us <= 0:
            return 0
        if per_pair * num_us < 1e-9 * max(per_token, 1e-9) ** 2:
            return int(min(num_us / per_token, 1 << 30)) if per_token > 0 else 1 << 30
        return int(min((sqrt(per_token**2 + 2 * per_pair * num_us) - per_token) / per_pair, 1 << 30))
