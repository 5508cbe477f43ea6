"""What a step of decodes costs with and without guesses, learned from the steps that return.

    microseconds = w0 + w1 rows + w2 tokens in their contexts
                   + w3 if a drafter was asked + w4 guesses + w5 guesses of the row with the most

A step without guesses has the first three parts. The last part is for drafters that compute the rows' guesses one
after the other. The time is the device's, including its wait for the plan.
"""

from penstock.core.steps.prefill_pace import LeastSquares

_SCALES = (1.0, 1 / 64, 1 / 65536, 1.0, 1 / 8, 1 / 4)
"""These scale the parts of a usual step to about one."""

_NUM_FIRST = 4


class DraftCosts(LeastSquares):
    """Costs in microseconds; `is_known` after enough steps of both kinds."""

    __slots__ = ("_num_plain", "_num_with")

    def __init__(self) -> None:
        super().__init__(len(_SCALES), _NUM_FIRST)
        self._num_plain = self._num_with = 0

    @property
    def is_known(self) -> bool:
        return min(self._num_plain, self._num_with) >= _NUM_FIRST

    @property
    def is_plain_known(self) -> bool:
        """Whether enough steps without guesses were seen."""
        return self._num_plain >= _NUM_FIRST

    def learn_plain(self, num_rows: int, num_context: int, num_us: int) -> None:
        """A step without guesses has returned; `num_us` 0: its time is unknown."""
        self._num_plain += 1
        if num_us:
            self.learn(_parts(num_rows, num_context), num_us)

    def learn_with(self, num_rows: int, num_context: int, num_guesses: int, longest: int, num_us: int) -> None:
        """A step for which a drafter was asked has returned; `longest`: the guesses of the row with the most."""
        self._num_with += 1
        if num_us:
            self.learn(_parts(num_rows, num_context, 1, num_guesses, longest), num_us)

    def plain_us(self, num_rows: int, num_context: int) -> float:
        """Return the time of a step without guesses."""
        return self.predict(_parts(num_rows, num_context))

    def extra_us(self) -> tuple[float, float, float]:
        """Return what is added by asking a drafter, by one guess, and by one more guess of the row with the most."""
        asked, guess, longest = self.weights[3:]
        return asked * _SCALES[3], guess * _SCALES[4], longest * _SCALES[5]


def _parts(num_rows: int, num_context: int, *guesses: int) -> list[float]:
    values = (1, num_rows, num_context, *(guesses or (0, 0, 0)))
    return [value * scale for value, scale in zip(values, _SCALES, strict=True)]
