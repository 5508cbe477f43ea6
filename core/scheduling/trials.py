"""What a worker makes beside its steps (grammars, embeddings of images), when a worker has died over it.

    a death while it is made    it is suspected: the worker may also have died of the step that it computed meanwhile.
                                So is what comes next: the answer may have died with the worker
    its turn comes again        no step is planned any more, and nothing else is to be made
    the worker does nothing     it is made alone
    a death meanwhile           it is guilty, and its requests end
    it is made                  it is cleared

Another engine whose worker has died names its suspects; here, too, they are made alone the first time.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

from penstock.ipc.messages import Message

Suspect = str | bytes
"""What a part knows it by: the text of a grammar, or the key of an image."""

_Key = TypeVar("_Key", bound=Suspect)

ENDS_WORKERS = "the worker died whenever it computed this request, and with this request alone"

_MAX_SUSPECTED = 1024
"""A suspect whose requests never come back is forgotten at last."""


class Trials:
    """The suspects of a scheduler's gates, the parts whose `admits` waits for the worker (`GrammarGate`, `ImageGate`).

    Pure bookkeeping: a gate asks `is_suspected` before it orders anything.
    """

    __slots__ = ("_order", "_suspected", "at_end", "current", "is_unsure")

    def __init__(self) -> None:
        self._suspected: dict[Suspect, None] = {}
        self._order: Message | None = None  # of the current one, until the worker does nothing else
        self.current: Suspect | None = None
        """What is made alone now, or as soon as the worker does nothing else."""
        self.is_unsure = False
        """Whether the worker may still make what nobody wants any more: of that it gives no answer."""
        self.at_end: list[Callable[[], None]] = []
        """Called when nothing is on trial any more."""

    def is_suspected(self, key: Suspect) -> bool:
        """Whether a worker may have died of this."""
        return key in self._suspected

    def suspect(self, key: Suspect) -> None:
        """A worker may have died of this."""
        self._suspected[key] = None
        while len(self._suspected) > _MAX_SUSPECTED:
            del self._suspected[next(iter(self._suspected))]

    def begin(self, key: Suspect, order: Message) -> None:
        """This suspect's turn has come."""
        self.current, self._order = key, order

    def take_order(self) -> Message | None:
        """The worker does nothing: return what it is to make alone, unless it was told before."""
        order, self._order = self._order, None
        return order

    @property
    def is_under_way(self) -> bool:
        """Whether the worker was told to make the suspect, and has not answered."""
        return self.current is not None and self._order is None

    @property
    def num_untold(self) -> int:
        """1 if there is a suspect that the worker was not told to make yet, otherwise 0."""
        return int(self._order is not None)

    def settled(self, key: Suspect) -> None:
        """It was made, or refused in good order: it kills nobody."""
        self._suspected.pop(key, None)
        self.abandoned(key)

    def abandoned(self, key: Suspect) -> None:
        """Nobody wants it any more, before it was made."""
        if key == self.current:
            self.end()

    def end(self) -> None:
        """Nothing is on trial any more."""
        self.current = self._order = None
        for tell in self.at_end:
            tell()

    def forget_worker(self) -> None:
        """The worker is gone, and with it all that it was making."""
        self.is_unsure = False
        self.end()

    def blame(self, unanswered: Iterable[_Key]) -> _Key | None:
        """A worker died that was asked for these in this order, and makes one at a time; return what surely killed it.

        The first one's answer may have died with the worker, which then was making the next one: both are suspected.
        """
        recent = [*islice(unanswered, 2)]
        if not recent:
            return None
        making = recent[0]
        if making == self.current and self.is_under_way and not self.is_unsure:
            self._suspected.pop(making, None)  # it may have been forgotten: others were suspected since
            return recent[0]
        for key in recent:
            self.suspect(key)
        return None
