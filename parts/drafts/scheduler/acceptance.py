"""Estimates how many guesses are accepted: per row and position, starting from what other rows have shown.

The chance that guess j of a row is right, given that those before it are, is estimated from r right ones among n tries.
Both counts decay step by step:

    chance[j] = (r[j] + m[j] prior[j]) / (n[j] + m[j])

m decays like the counts, so the prior loses weight as the row is observed. The prior is the mean of the server's chance
at j and the row's own at j - 1: a row that copies a text goes on copying. A row's k guesses bring the sum of the
products chance[0] ... chance[j] for j < k.
"""

from collections.abc import Sequence as ListOf

_PRIOR_STRENGTH = 4.0
_UNLIKELY = 0.5
_FIRST_CHANCE = 0.6  # optimistic, so that guessing begins
_ROW_MEMORY, _SERVER_MEMORY = 0.97, 0.995
_FIRST_GUESS_RATE, _GUESS_MEMORY = 0.5, 0.98  # long: tokens that a format forces come only now and then


class ServerAcceptance:
    """The acceptance over all rows."""

    __slots__ = ("chances", "gains", "guess_rate", "right", "tried")

    def __init__(self, most: int) -> None:
        self.right = [0.0] * most
        self.tried = [0.0] * most
        self.guess_rate = _FIRST_GUESS_RATE  # share of the allowed guesses that a drafter makes
        self.chances = [_FIRST_CHANCE] * most
        self.gains = _products(self.chances)

    def note(self, allowed: int, guessed: int, accepted: int) -> None:
        """A row's guesses were verified; call `update` after all rows of the step."""
        self.guess_rate += (guessed / allowed - self.guess_rate) * (1 - _GUESS_MEMORY)
        _count(self.right, self.tried, guessed, accepted, _SERVER_MEMORY)

    def update(self) -> None:
        """Recompute the chances after a step."""
        before = _FIRST_CHANCE
        for j, (right, tried) in enumerate(zip(self.right, self.tried, strict=True)):
            before = self.chances[j] = (right + _PRIOR_STRENGTH * before) / (tried + _PRIOR_STRENGTH)
        self.gains = _products(self.chances)


class RowAcceptance:
    """The acceptance of one sequence, and when to try guesses for it again even if they do not pay."""

    __slots__ = ("gains", "guess_rate", "interval", "priors", "right", "tried", "tries_at")

    def __init__(self, server: ServerAcceptance) -> None:
        self.right = [0.0] * len(server.chances)
        self._begin_anew()
        self.guess_rate = server.guess_rate
        self.gains = server.gains
        """Tokens that each guess is expected to bring; never more than the guess before it."""
        self.interval = 0.0  # steps between two tries
        self.tries_at = 0  # number of a step

    def _begin_anew(self) -> None:
        self.right = [0.0] * len(self.right)
        self.tried = [0.0] * len(self.right)
        self.priors = [_PRIOR_STRENGTH] * len(self.right)  # m

    def note(self, allowed: int, guessed: int, accepted: int, server: ServerAcceptance) -> None:
        """The row's guesses in a step were verified. A drafter that guesses nothing has not failed."""
        self.guess_rate += (guessed / allowed - self.guess_rate) * (1 - _GUESS_MEMORY)
        if not guessed:
            return
        if accepted == guessed > 1 and self.gains[0] < _UNLIKELY:  # the row has changed: it may copy a text now
            self._begin_anew()
        _count(self.right, self.tried, guessed, accepted, _ROW_MEMORY)
        chances: list[float] = []
        before = server.chances[0]
        for j in range(min(guessed, accepted + 1)):
            self.priors[j] *= _ROW_MEMORY
        for right, tried, strength, prior in zip(self.right, self.tried, self.priors, server.chances, strict=True):
            before = (right + strength * (prior + before) / 2) / (tried + strength)
            chances.append(before)
        self.gains = _products(chances)


def _count(right: list[float], tried: list[float], guessed: int, accepted: int, memory: float) -> None:
    """Count the guesses that were tried: all up to and including the first wrong one."""
    for j in range(min(guessed, accepted + 1)):
        right[j] = right[j] * memory + (j < accepted)
        tried[j] = tried[j] * memory + 1


def _products(chances: ListOf[float]) -> list[float]:
    gains: list[float] = []
    product = 1.0
    for chance in chances:
        product *= chance
        gains.append(product)
    return gains
