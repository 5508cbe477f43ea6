"""A model of a worker's vision tower, which encodes in turns between steps (`parts/images/worker/turns.py`)."""

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from statistics import median

from penstock.parts.images.messages import DropEmbedding, EncodeImage, ImageEncoded

SHORTEST_SECONDS, PART_OF_STEP, NUM_RECENT = 0.001, 0.4, 9
STEPS_SHARE = 2.0
"""The worker's values: the shortest turn, a turn's length as a part of recent steps' median, and the pause after a turn
as a multiple of it, if there are steps."""


class _Encoding:
    """An image that is being encoded, or waits."""

    __slots__ = ("arrived", "embedding_id", "left", "seconds")

    def __init__(self, message: EncodeImage, arrived: float, seconds: float) -> None:
        self.embedding_id = message.embedding_id
        self.arrived = arrived
        self.seconds = self.left = seconds


class ModelledTower:
    """Encodes one image after the other, when the device is free and it is the tower's turn."""

    def __init__(self, seconds_of: Callable[[int], float]) -> None:
        """`seconds_of`: from an image's number of embeddings to the device's seconds."""
        self._seconds_of = seconds_of
        self._waiting: deque[_Encoding] = deque()
        self._done: deque[tuple[float, ImageEncoded]] = deque()
        self._free = 0.0  # when the device is free, as far as is known
        self._not_before = 0.0
        self._is_shared = False  # whether there has been a step since the last turn
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)  # seconds of steps
        self.busy = 0.0  # seconds

    def order(self, messages: Iterable[EncodeImage | DropEmbedding], arrived: float) -> None:
        """Take orders of the scheduler, which arrived at `arrived`."""
        for message in messages:
            if isinstance(message, EncodeImage):
                self._waiting.append(_Encoding(message, arrived, self._seconds_of(message.num_embeddings)))
            else:
                kept = (each for each in self._waiting if each.embedding_id != message.embedding_id)
                self._waiting = deque(kept)

    def free_at(self, at: float) -> float:
        """Give the tower its turns that are due before `at`; return when a step that is ready at `at` can begin."""
        while self._waiting:
            its = self._waiting[0]
            begins = self._next_turn(its)
            if begins > at:
                break
            spent = min(its.left, self._turn)
            its.left -= spent
            self.busy += spent
            self._free = begins + spent
            self._not_before = self._free + (STEPS_SHARE * spent if self._is_shared else 0.0)
            self._is_shared = False
            if its.left <= 0:
                self._waiting.popleft()
                self._done.append((self._free, ImageEncoded(its.embedding_id, round(its.seconds * 1e6))))
        return max(at, self._free)

    def stepped(self, ended: float, seconds: float) -> None:
        """A step has the device for this time, until `ended`."""
        self._free = max(self._free, ended)
        self._is_shared = True
        self._recent.append(seconds)

    @property
    def _turn(self) -> float:
        return max(SHORTEST_SECONDS, PART_OF_STEP * median(self._recent)) if self._recent else SHORTEST_SECONDS

    @property
    def ready_at(self) -> float:
        """When the next image will be encoded, if no step comes first."""
        if self._done:
            return self._done[0][0]
        if not self._waiting:
            return inf
        its = self._waiting[0]
        stays_away = STEPS_SHARE * self._turn if self._is_shared and its.left > self._turn else 0.0
        return self._next_turn(its) + its.left + stays_away

    def take_encoded(self, now: float) -> list[ImageEncoded]:
        """Return the images encoded by now."""
        self.free_at(now)
        found = []
        while self._done and self._done[0][0] <= now:
            found.append(self._done.popleft()[1])
        return found

    def _next_turn(self, its: _Encoding) -> float:
        return max(self._free, self._not_before, its.arrived)
