"""The folder of the disk tier: numbered places for pages, in files of many places each.

    DIR/3f0c...d1/                      one folder for each identity: model, weights, layout, dtype, kernels
        about.json                      the identity in readable form
        lock                            held by the worker that uses the folder
        000000.kv  000001.kv  ...       `segment.py`

The scheduler manages the places: it decides which page goes where, and which is overwritten. The store only carries
this out, and lists at start-up what the places hold. Unknown files, and folders of other identities, are left alone.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import structlog

from penstock.parts.disk.worker.identity import Identity
from penstock.parts.disk.worker.segment import NO_KEY, DamagedError, Entry, NewerFormatError, Segment, Shape

log = structlog.get_logger()

_SEGMENT_BYTES = 64 << 20
_MAX_CAPACITY = 4096
MAX_PAGES = 1 << 24
_NAME = re.compile(r"(\d{6})\.kv")


class Held(NamedTuple):
    """A place that holds a page."""

    place: int
    key: bytes  # [16]


class DiskStore:
    """Places 0 .. num_pages-1. Different places may be read and written concurrently."""

    def __init__(self, folder: Path, identity: Identity, num_pages: int, lock: int) -> None:
        """`lock`: file descriptor of the folder's lock file, which this store owns from now on."""
        self.num_pages = num_pages
        self.page_bytes = identity.page_bytes
        self.num_damaged_files = 0
        self._folder = folder
        self._lock = lock
        self._shape = shape_of(identity)
        num_files = -(-num_pages // self._shape.capacity)
        self._segments = [Segment(folder / f"{i:06d}.kv", self._shape) for i in range(num_files)]
        self._unusable: set[int] = set()  # numbers of files that a later version wrote
        self._next_stamp = 1

    def read_tables(self) -> None:
        """Read the tables of all files; drop damaged files, and pages beyond the budget.

        Raises:
            OSError: the folder cannot be read or changed.
        """
        found = {int(name[1]): path for path in self._folder.iterdir() if (name := _NAME.fullmatch(path.name))}
        for number, path in sorted(found.items()):
            if number >= len(self._segments):
                path.unlink()
                continue
            try:
                self._segments[number].read_table()
            except NewerFormatError:
                log.warning("disk KV: file of a later version left alone", file=str(path))
                self._unusable.add(number)
            except (DamagedError, OSError) as error:
                log.warning("disk KV: damaged file dropped", file=str(path), reason=str(error))
                self.num_damaged_files += 1
                path.unlink()
        last, num_in_last = divmod(self.num_pages, self._shape.capacity)
        if num_in_last and last in found and last not in self._unusable and found[last].exists():
            self._segments[last].cut(num_in_last)
        latest = max((self._entry_at(place).stamp for place in self._places()), default=0)
        self._next_stamp = latest + 1

    def held(self) -> list[Held]:
        """Return the places that hold pages, the least recently used first. No two have the same key."""
        latest: dict[bytes, tuple[int, int]] = {}
        for place in self._places():
            key, _, stamp = self._entry_at(place)
            if key != NO_KEY and (stamp, place) > latest.get(key, (-1, -1)):
                latest[key] = stamp, place
        return [Held(place, key) for key, (_, place) in sorted(latest.items(), key=lambda item: item[1])]

    def unusable(self) -> list[int]:
        """Return the places that must stay empty."""
        return [place for place in range(self.num_pages) if place // self._shape.capacity in self._unusable]

    def take_stamps(self, count: int) -> range:
        """Return stamps for the next uses of places, larger than all before."""
        stamps = range(self._next_stamp, self._next_stamp + count)
        self._next_stamp += count
        return stamps

    def write(self, place: int, key: bytes, page: memoryview, stamp: int) -> None:
        """Write a page [page_bytes] to a place.

        Raises:
            OSError: the disk is full or fails. Then the place is empty.
        """
        segment, index = self._find(place)
        if place // self._shape.capacity in self._unusable:
            raise OSError(f"place {place} is in a file of a later version")
        segment.write(index, key, page, stamp)

    def read(self, place: int, key: bytes, page: memoryview, stamp: int) -> None:
        """Fill `page` [page_bytes].

        Raises:
            DamagedError: the place does not hold what was written under this key. Now it is empty.
            OSError: the disk fails.
        """
        segment, index = self._find(place)
        segment.read(index, key, page, stamp)

    def drop_all(self) -> None:
        """Empty all places."""
        for segment in self._segments:
            segment.remove()

    def close(self) -> None:
        """Release the folder."""
        os.close(self._lock)

    def _places(self) -> Iterator[int]:
        return (place for place in range(self.num_pages) if place // self._shape.capacity not in self._unusable)

    def _entry_at(self, place: int) -> Entry:
        segment, index = self._find(place)
        return segment.entry(index)

    def _find(self, place: int) -> tuple[Segment, int]:
        number, index = divmod(place, self._shape.capacity)
        return self._segments[number], index


def shape_of(identity: Identity) -> Shape:
    """Return the shape of the files for this identity."""
    capacity = max(1, min(_SEGMENT_BYTES // identity.page_bytes, _MAX_CAPACITY))
    return Shape(identity.digest(), identity.page_bytes, capacity)


def pages_within(identity: Identity, max_bytes: int) -> int:
    """Return how many pages fit in this many bytes, together with headers and entries."""
    shape = shape_of(identity)
    num_full, rest = divmod(max_bytes, shape.num_bytes)
    num_more = max(0, rest - shape.data_offset) // shape.page_bytes
    return min(MAX_PAGES, num_full * shape.capacity + num_more)


def open_store(root: Path, identity: Identity, max_bytes: int, patience: float = 0.0) -> DiskStore | None:
    """Open the folder of this identity, or return None and log why there is no disk tier.

    Args:
        root: the folder that the user named.
        identity: of the pages.
        max_bytes: budget of the files.
        patience: seconds to wait for a worker that has just died to release the lock.
    """
    num_pages = pages_within(identity, max_bytes)
    if not num_pages:
        log.warning("disk KV: off, its budget is smaller than a page", page_bytes=identity.page_bytes)
        return None
    folder = root / identity.digest().hex()[:32]
    lock = -1
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)  # because pages reveal the prompts
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not _locked(lock, patience):
            log.warning("disk KV: off, another worker uses the folder", folder=str(folder))
            os.close(lock)
            return None
        (folder / "about.json").write_bytes(identity.about())
        store = DiskStore(folder, identity, num_pages, lock)
        store.read_tables()
    except OSError as error:
        log.error("disk KV: off, the folder cannot be used", folder=str(folder), reason=str(error))
        if lock >= 0:
            os.close(lock)
        return None
    return store


def _locked(lock: int, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        else:
            return True
