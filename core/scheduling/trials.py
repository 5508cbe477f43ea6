"""What a worker makes beside its steps (grammars, embeddings of images), when a worker has died over it.

    a death while it is made    it is suspected: the worker may also have died of the step that it computed meanwhile
    its turn comes again        it is made alone: nothing else of its kind, and no step beside it
    a death meanwhile           it is guilty, and its requests end
    it is made                  it is cleared

Another engine whose worker has died names its suspects; here, too, they are made alone the first time.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_MAX_SUSPECTED = 1024
"""A suspect whose requests never come back is forgotten at last."""


class Trials(Generic[Key]):
    """The suspects of one kind, by key. Pure bookkeeping: a gate asks `suspect_among` before it asks the worker."""

    __slots__ = ("_suspected", "current")

    def __init__(self) -> None:
        self._suspected: dict[Key, None] = {}
        self.current: Key | None = None
        """What is made alone now."""

    def is_suspected(self, key: Key) -> bool:
        """Whether a worker may have died of this."""
        return key in self._suspected

    def suspect(self, key: Key) -> None:
        """A worker may have died of this."""
        self._suspected[key] = None
        while len(self._suspected) > _MAX_SUSPECTED:
            del self._suspected[next(iter(self._suspected))]

    def suspect_among(self, keys: Iterable[Key]) -> Key | None:
        """The first suspect among these, which must be made alone; None if there is none."""
        return next((key for key in keys if key in self._suspected), None)

    def begin(self, key: Key) -> None:
        """The worker is asked for this suspect alone."""
        self.current = key

    def settled(self, key: Key) -> None:
        """It was made, or refused in good order: it kills nobody."""
        self._suspected.pop(key, None)
        self.abandoned(key)

    def abandoned(self, key: Key) -> None:
        """Nobody wants it any more, before it was made."""
        if key == self.current:
            self.current = None

    def blame(self, making: Key | None, *, was_idle: bool) -> Key | None:
        """A worker died; return what certainly killed it.

        Args:
            making: what it was making, or None.
            was_idle: whether it had no step to compute.
        """
        guilty = making if making is not None and making == self.current and was_idle else None
        if guilty is not None:
            self._suspected.pop(guilty, None)
        elif making is not None:
            self.suspect(making)
        return guilty
