"""What one engine has cached by its own reports (`CacheEvents`), and what it will have soon.

    told       pages by their short keys, on the device, on the host, or both; the oldest are forgotten at a limit
    expected   pages of prompts that were sent there a short while ago: the engine has not reported them yet

After a missed message a snapshot is requested; until it comes, the known pages are used.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from time import monotonic
from typing import NamedTuple

from penstock.ipc.codec import MalformedMessage, unpack_uint64
from penstock.ipc.messages import CacheEvents

MAX_PAGES = 1 << 19
"""Limit for one engine: some 60 MB at most. With pages of 16 tokens that is the KV of eight million tokens."""

MAX_EXPECTED, EXPECT_SECONDS = 1 << 16, 10.0
"""Limit of expected pages, and how long they are expected: by then they were reported, or the request has ended."""

_FORGOTTEN_AT_ONCE = 16
"""At the limit, one page in this many is forgotten at once."""

_ASK_AGAIN_SECONDS, _PART_SECONDS = 2.0, 5.0
"""Least time between two questions; most time between two parts of a snapshot, whose last parts may be lost."""

_ON_DEVICE, _ON_HOST = 1, 2


class Found(NamedTuple):
    """Pages at the start of a prompt."""

    num_device: int = 0  # on the device, or expected there
    num_host: int = 0
    """Pages on the host only, which have to be copied first."""


class CachedPages:
    """The cached pages of one engine. `ask` asks the engine for a snapshot."""

    def __init__(self, ask: Callable[[], object], max_pages: int = MAX_PAGES) -> None:
        self._ask = ask
        self._max_pages = max_pages
        self._asked_at = -_ASK_AGAIN_SECONDS
        self._places: dict[int, int] = {}  # in the order of their last report or, when crowded, use
        self._expected: dict[int, float] = {}  # until when
        self._number: int | None = None  # of the latest message; None: a snapshot has to come first
        self._part: int | None = None  # the latest part of a snapshot that is not complete yet
        self._part_at = 0.0
        self.num_gaps = 0
        self.page_size = 0  # tokens; 0: nothing is cached
        self.longest_usual_prompt = 0
        self.is_each_length_special = False

    @property
    def num_pages(self) -> int:
        """The number of known pages."""
        return len(self._places)

    @property
    def is_complete(self) -> bool:
        """Whether everything was reported, and no message is missing."""
        return self._number is not None and self._part is None

    def take(self, events: CacheEvents) -> None:
        """Apply the engine's latest message.

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
        """A prompt with these pages is sent to the engine."""
        until, expected = monotonic() + EXPECT_SECONDS, self._expected
        for key in keys:
            if key not in self._places:
                expected.pop(key, None)
                expected[key] = until
        if len(expected) > MAX_EXPECTED:
            for key in list(islice(expected, len(expected) - MAX_EXPECTED + MAX_EXPECTED // _FORGOTTEN_AT_ONCE)):
                del expected[key]

    def find(self, keys: Iterable[int]) -> Found:
        """Return how much of a prompt's start is cached; takes `keys` one by one, up to the first that is not."""
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
            if is_crowded:  # pages in use must not count as old
                places[key] = places.pop(key)
            if place & _ON_DEVICE:
                num_device += 1
            else:
                num_host += 1
        return Found(num_device, num_host)

    def forget(self) -> None:
        """Forget everything: the engine is gone, and its next messages must begin with a snapshot."""
        self._places, self._expected, self._number, self._part = {}, {}, None, None

    def known(self) -> dict[int, int]:
        """Return the place of every known page, for checks. 1: on the device, 2: on the host, 3: on both."""
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
