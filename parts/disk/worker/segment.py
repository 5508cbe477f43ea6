"""One file of the disk tier: a header, a table of entries, and as many pages.

    0       header: magic, version, page bytes, pages, identity of what computed them, digest of the header
    128     entry 0: key, digest, stamp | entry 1 | ...            40 bytes each
    4096*k  page 0 | page 1 | ...                                  the file ends after the last page ever written

Whatever happens to the file, a page is either found as it was written or not at all. Its digest is computed from its
bytes and keyed with its key. So a flipped bit, a truncated page, and an entry that belongs to other bytes all give a
different digest. For the same reason nothing is synced: after a power cut, an entry may exist without its page, and
the digest shows it. Before a page is overwritten its entry is cleared, so a process that is killed meanwhile leaves an
empty place.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import NamedTuple

FORMAT_VERSION = 1
KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
"""The key of an empty place."""

_MAGIC = b"PENSTKV\n"
_HEADER = Struct("<8sIIQ32s")
_HEADER_BYTES = 128  # with the digest and padding
_ENTRY = Struct("<16s16sQ")
_BLOCK = 4096
_MAX_STAMP = 1 << 62  # anything above comes from a damaged file


class DamagedError(Exception):
    """The file does not contain what was written there."""


class NewerFormatError(Exception):
    """A later version of Penstock wrote the file."""


class Shape(NamedTuple):
    """The properties that all files of a folder share."""

    identity: bytes  # [32]: identifies model, layout and kernels
    page_bytes: int
    capacity: int  # pages

    @property
    def data_offset(self) -> int:
        """Where the first page begins."""
        return -(-(_HEADER_BYTES + self.capacity * _ENTRY.size) // _BLOCK) * _BLOCK

    @property
    def num_bytes(self) -> int:
        """Bytes of a full file."""
        return self.data_offset + self.capacity * self.page_bytes

    def header(self) -> bytes:
        """The first bytes of each file."""
        fields = _HEADER.pack(_MAGIC, FORMAT_VERSION, self.capacity, self.page_bytes, self.identity)
        return (fields + blake2b(fields, digest_size=16).digest()).ljust(_HEADER_BYTES, b"\0")


class Entry(NamedTuple):
    """One place of the table."""

    key: bytes  # [16]
    digest: bytes  # [16]
    stamp: int  # larger for later use


class Segment:
    """The file need not exist. Then all places are empty, and the first write creates it."""

    def __init__(self, path: Path, shape: Shape) -> None:
        self.path = path
        self._shape = shape
        self._table = bytearray(shape.capacity * _ENTRY.size)
        self._exists = False

    def read_table(self) -> None:
        """Read the table of entries from the file. Entries of pages beyond its end are left out.

        Raises:
            DamagedError: the header is not that of such a file.
            NewerFormatError: a later version wrote the file.
            OSError: the file cannot be read.
        """
        header = self._shape.header()
        wanted = len(header) + len(self._table)
        with self._opened(os.O_RDONLY) as file:
            begin = os.pread(file, wanted, 0)
            size = os.fstat(file).st_size
        if begin[:8] == _MAGIC and len(begin) >= 12 and int.from_bytes(begin[8:12], "little") > FORMAT_VERSION:
            raise NewerFormatError(str(self.path))
        if begin[: len(header)] != header or len(begin) != wanted:
            raise DamagedError(f"{self.path} does not begin as a file of this model's pages does")
        self._table[:] = begin[len(header) :]
        self._exists = True
        num_whole = max(0, size - self._shape.data_offset) // self._shape.page_bytes
        for index in range(num_whole, self._shape.capacity):
            self._table[index * _ENTRY.size : (index + 1) * _ENTRY.size] = bytes(_ENTRY.size)

    def entry(self, index: int) -> Entry:
        """Return the entry of a place."""
        key, digest, stamp = _ENTRY.unpack_from(self._table, index * _ENTRY.size)
        return Entry(key, digest, stamp if stamp < _MAX_STAMP else 0)

    def write(self, index: int, key: bytes, page: memoryview, stamp: int) -> None:
        """Write a page to a place, whatever the place holds.

        Raises:
            OSError: the disk is full or fails. Then the place is empty, and all others are unchanged.
        """
        entry = _ENTRY.pack(key, _digest(key, page), stamp)
        with self._opened(os.O_RDWR, may_create=True) as file:
            if self.entry(index).key != NO_KEY:
                self._put_entry(file, index, bytes(_ENTRY.size))
            _write_all(file, page, self._page_offset(index))
            self._put_entry(file, index, entry)

    def read(self, index: int, key: bytes, page: memoryview, stamp: int) -> None:
        """Fill `page` from a place that holds `key`, and record the use.

        Raises:
            DamagedError: the bytes are not those that were written under this key. Then the place is empty.
            OSError: the place cannot be read.
        """
        found = self.entry(index)
        if found.key != key:
            raise DamagedError(f"{self.path} no longer holds the page")
        with self._opened(os.O_RDWR) as file:
            if _read_all(file, page, self._page_offset(index)) and _digest(key, page) == found.digest:
                self._put_entry(file, index, _ENTRY.pack(key, found.digest, stamp))
                return
            self._put_entry(file, index, bytes(_ENTRY.size))
        raise DamagedError(f"page {index} of {self.path} is damaged")

    def clear(self, index: int) -> None:
        """Empty a place.

        Raises:
            OSError: the file cannot be written. The place counts as empty all the same.
        """
        if self.entry(index).key == NO_KEY:
            return
        with self._opened(os.O_RDWR) as file:
            self._put_entry(file, index, bytes(_ENTRY.size))

    def remove(self) -> None:
        """Empty all places, and free their disk space."""
        self._table[:] = bytes(len(self._table))
        if self._exists:
            self._exists = False
            with suppress(OSError):  # if the file stays, its pages are read again at the next start, like any others
                self.path.unlink()

    def cut(self, num_pages: int) -> None:
        """Drop the places from `num_pages` on, and free their disk space.

        Raises:
            OSError: the file cannot be changed.
        """
        for index in range(num_pages, self._shape.capacity):
            self.clear(index)
        with self._opened(os.O_RDWR) as file:
            end = self._page_offset(num_pages)
            if os.fstat(file).st_size > end:
                os.ftruncate(file, end)

    def _page_offset(self, index: int) -> int:
        return self._shape.data_offset + index * self._shape.page_bytes

    def _put_entry(self, file: int, index: int, entry: bytes) -> None:
        start = index * _ENTRY.size
        self._table[start : start + _ENTRY.size] = bytes(_ENTRY.size)  # in case the write fails
        _write_all(file, memoryview(entry), _HEADER_BYTES + start)
        self._table[start : start + _ENTRY.size] = entry

    @contextmanager
    def _opened(self, flags: int, *, may_create: bool = False) -> Iterator[int]:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.open(self.path, flags)
        except FileNotFoundError:
            self._table[:] = bytes(len(self._table))  # the file was removed, or never existed
            if not may_create:
                raise
            file = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            self._exists = False
        try:
            if may_create and not self._exists:
                _write_all(file, memoryview(self._shape.header() + bytes(len(self._table))), 0)
                self._exists = True
            yield file
        finally:
            os.close(file)


def _digest(key: bytes, page: memoryview) -> bytes:
    return blake2b(page, key=key, digest_size=16).digest()


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _read_all(file: int, data: memoryview, offset: int) -> bool:
    """Fill `data`; returns False if the file ends before."""
    while data:
        count = os.preadv(file, [data], offset)
        if not count:
            return False
        data, offset = data[count:], offset + count
    return True
