"""How many guesses are right: of each row, by position, as seen; before a row has shown it, as other rows have.

The chance that guess j of a row is right, if those before it are, is estimated from counts r of right ones among n
tries, which are forgotten step by step:

    chance[j] = (r[j] + m[j] prior[j]) / (n[j] + m[j])

m is forgotten like the counts, as the row shows what it is. The prior is the server's chance at j, averaged with the
row's own at j - 1: a row that copies a text goes on copying. What a row's k guesses bring is then the sum of the
products chance[0] ... chance[j] for j < k.
"""

from collections.abc import Sequence as ListOf

_PRIOR_STRENGTH = 4.0
_UNLIKELY = 0.5
_FIRST_CHANCE = 0.6  # hopeful, so that guessing begins
_ROW_MEMORY, _SERVER_MEMORY = 0.97, 0.995
_FIRST_GUESS_RATE, _GUESS_MEMORY = 0.5, 0.98  # long: what a form forces comes now and then


class ServerAcceptance:
    """Of all rows."""

    __slots__ = ("chances", "gains", "guess_rate", "right", "tried")

    def __init__(self, most: int) -> None:
        self.right = [0.0] * most
        self.tried = [0.0] * most
        self.guess_rate = _FIRST_GUESS_RATE  # part of the guesses allowed that a drafter makes
        self.chances = [_FIRST_CHANCE] * most
        self.gains = _products(self.chances)

    def note(self, allowed: int, guessed: int, accepted: int) -> None:
        """A row's guesses were verified; `update` follows."""
        self.guess_rate += (guessed / allowed - self.guess_rate) * (1 - _GUESS_MEMORY)
        _count(self.right, self.tried, guessed, accepted, _SERVER_MEMORY)

    def update(self) -> None:
        """Compute the chances anew, after a step."""
        before = _FIRST_CHANCE
        for j, (right, tried) in enumerate(zip(self.right, self.tried, strict=True)):
            before = self.chances[j] = (right + _PRIOR_STRENGTH * before) / (tried + _PRIOR_STRENGTH)
        self.gains = _products(self.chances)


class RowAcceptance:
    """Of one sequence, and when it is tried again although it does not pay."""

    __slots__ = ("gains", "guess_rate", "interval", "priors", "right", "tried", "tries_at")

    def __init__(self, server: ServerAcceptance) -> None:
        self.right = [0.0] * len(server.chances)
        self._begin_anew()
        self.guess_rate = server.guess_rate
        self.gains = server.gains
        """Tokens that each guess is expected to bring: never more than the one before it."""
        self.interval = 0.0  # steps between two tries
        self.tries_at = 0  # the number of a step

    def _begin_anew(self) -> None:
        self.right = [0.0] * len(self.right)
        self.tried = [0.0] * len(self.right)
        self.priors = [_PRIOR_STRENGTH] * len(self.right)  # m

    def note(self, allowed: int, guessed: int, accepted: int, server: ServerAcceptance) -> None:
        """Its guesses in a step were verified. A drafter that guesses nothing has not failed."""
        self.guess_rate += (guessed / allowed - self.guess_rate) * (1 - _GUESS_MEMORY)
        if not guessed:
            return
        if accepted == guessed > 1 and self.gains[0] < _UNLIKELY:  # it has changed: it may copy a text now
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
    """Each guess up to the first wrong one was tried."""
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
