"""What one engine has cached, as it tells (`CacheEvents`), and what it is about to have.

    told       pages by their short keys, on the device, on the host, or both; forgotten by age at a bound
    expected   pages of prompts that were sent there, for a while: nobody has told of them yet

Whoever misses a message asks for a snapshot, and goes on with what is known until it comes.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from time import monotonic
from typing import NamedTuple

from penstock.ipc.codec import MalformedMessage, unpack_uint64
from penstock.ipc.messages import CacheEvents

MAX_PAGES = 1 << 19
"""Of one engine: some 60 MB at most. With pages of 16 tokens that is the KV of eight million tokens."""

MAX_EXPECTED, EXPECT_SECONDS = 1 << 16, 10.0
"""Pages, and how long they are expected: sooner or later they are told, or the request has ended before."""

_FORGOTTEN_AT_ONCE = 16
"""Part of the bound: one in so many."""

_ASK_AGAIN_SECONDS, _PART_SECONDS = 2.0, 5.0
"""Between two questions; and between two parts of a snapshot, of which the last ones may be lost."""

_ON_DEVICE, _ON_HOST = 1, 2


class Found(NamedTuple):
    """Pages at the start of a prompt."""

    num_device: int = 0  # or expected there
    num_host: int = 0
    """Those that have to be copied first."""


class CachedPages:
    """One engine's. `ask` asks it for a snapshot."""

    def __init__(self, ask: Callable[[], object], max_pages: int = MAX_PAGES) -> None:
        self._ask = ask
        self._max_pages = max_pages
        self._asked_at = -_ASK_AGAIN_SECONDS
        self._places: dict[int, int] = {}  # in the order in which they were last told or found, if it is crowded
        self._expected: dict[int, float] = {}  # until when
        self._number: int | None = None  # of the latest message; None: a snapshot has to come first
        self._part: int | None = None  # of a snapshot that is being told
        self._part_at = 0.0
        self.num_gaps = 0
        self.page_size = 0  # tokens; 0: nothing is cached
        self.longest_usual_prompt = 0
        self.is_each_length_special = False

    @property
    def num_pages(self) -> int:
        """Known pages."""
        return len(self._places)

    @property
    def is_complete(self) -> bool:
        """Whether all was told, and no message is missing."""
        return self._number is not None and self._part is None

    def take(self, events: CacheEvents) -> None:
        """Learn from the engine's latest message.

        Raises:
            MalformedMessage: if it cannot be read.
        """
        if events.part == 0:
            self._places, self._number, self._part = {}, events.number, -1
            self.page_size = events.page_size
            self.longest_usual_prompt = events.longest_usual_prompt
            self.is_each_length_special = events.is_each_length_special
        if self._number is None or not self._follows(events):
            self._miss()
            return
        self._number = events.number
        if events.part >= 0:
            self._part, self._part_at = None if events.is_last else events.part, monotonic()
        for place, changes in ((_ON_DEVICE, events.device), (_ON_HOST, events.host)):
            try:
                gained, lost = unpack_uint64(changes.gained), unpack_uint64(changes.lost)
            except ValueError as error:
                raise MalformedMessage(str(error)) from None
            self._gain(gained, place)
            self._lose(lost, place)
        if len(self._places) > self._max_pages:
            num_old = len(self._places) - self._max_pages + self._max_pages // _FORGOTTEN_AT_ONCE
            for key in list(islice(self._places, num_old)):
                del self._places[key]

    def expect(self, keys: Iterable[int]) -> None:
        """A prompt with these pages goes there."""
        until, expected = monotonic() + EXPECT_SECONDS, self._expected
        for key in keys:
            if key not in self._places:
                expected.pop(key, None)
                expected[key] = until
        if len(expected) > MAX_EXPECTED:
            for key in list(islice(expected, len(expected) - MAX_EXPECTED + MAX_EXPECTED // _FORGOTTEN_AT_ONCE)):
                del expected[key]

    def find(self, keys: Iterable[int]) -> Found:
        """Return how much of a prompt's start is there; `keys` are asked for one by one, until one is not."""
        places, expected = self._places, self._expected
        is_crowded, now = len(places) > self._max_pages // 2, monotonic()
        num_device = num_host = 0
        for key in keys:
            place = places.get(key)
            if place is None:
                if expected.get(key, 0.0) < now:
                    break
                num_device += 1
                continue
            if is_crowded:  # what is in use is not old
                places[key] = places.pop(key)
            if place & _ON_DEVICE:
                num_device += 1
            else:
                num_host += 1
        return Found(num_device, num_host)

    def forget(self) -> None:
        """The engine is gone: whatever comes next begins with a snapshot."""
        self._places, self._expected, self._number, self._part = {}, {}, None, None

    def known(self) -> dict[int, int]:
        """Return all known pages; for checks. 1: on the device, 2: on the host, 3: on both."""
        return dict(self._places)

    def _follows(self, events: CacheEvents) -> bool:
        if events.part < 0:
            is_stuck = self._part is not None and monotonic() - self._part_at > _PART_SECONDS
            return not is_stuck and events.number == (self._number or 0) + 1
        return events.number == self._number and self._part is not None and events.part == self._part + 1

    def _miss(self) -> None:
        if self._number is not None:
            self.num_gaps += 1
        self._number = self._part = None
        now = monotonic()
        if now - self._asked_at >= _ASK_AGAIN_SECONDS:
            self._asked_at = now
            self._ask()

    def _gain(self, keys: Iterable[int], place: int) -> None:
        places, expected = self._places, self._expected
        for key in keys:
            places[key] = places.pop(key, 0) | place
            if expected:
                expected.pop(key, None)

    def _lose(self, keys: Iterable[int], place: int) -> None:
        places = self._places
        for key in keys:
            left = places.get(key, 0) & ~place
            if left:
                places[key] = left
            else:
                places.pop(key, None)
