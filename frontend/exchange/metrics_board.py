"""Shared memory where the frontends of one launch read each other's metrics; the supervisor makes it, they inherit it.

    region of frontend 0         region of frontend 1       ...
    [ snapshot | older one ]     [ snapshot | older one ]

A frontend writes only into its own region, over the older of two snapshots. What it wrote outlives it: its successor
adds to it, so that no counter ever falls. The memory is read and written like a file but belongs to no file system. So
a full disk cannot affect it, and a lack of memory is an error that is caught.
"""

import os
import struct
import zlib
from typing import NamedTuple

import msgspec
import structlog

log = structlog.get_logger()

_SLOT_BYTES = 1 << 19
_HEADER = struct.Struct("<QII")  # number of the snapshot, from 1; bytes; checksum of number and content


class Sample(NamedTuple):
    """One value of a metric."""

    name: str
    labels: dict[str, str]
    value: float


Snapshot = dict[str, list[Sample]]
"""Metric's name -> its samples."""


class MetricsBoard:
    """The shared memory, as one frontend sees it."""

    def __init__(self, descriptor: int, index: int, num_frontends: int) -> None:
        """`index` is this frontend's number among `num_frontends`."""
        self._descriptor = descriptor
        self._index = index
        self._others = [i for i in range(num_frontends) if i != index]
        self._decoder = msgspec.msgpack.Decoder(Snapshot)
        self._number, self.inherited = self._read(index)
        """The counts of the process that this one replaces."""

    def publish(self, snapshot: Snapshot) -> None:
        """Publish a snapshot to the other frontends. If memory for it is lacking, they keep reading the last one."""
        content = msgspec.msgpack.encode(snapshot)
        number = self._number + 1
        header = _HEADER.pack(number, len(content), zlib.crc32(content, number & 0xFFFFFFFF))
        if len(header) + len(content) > _SLOT_BYTES:
            log.error("too many metrics to share between frontends", bytes=len(content), most=_SLOT_BYTES)
            return
        try:
            os.pwrite(self._descriptor, header + content, self._offset(self._index, number))
        except OSError as error:
            log.error("cannot share metrics between frontends", reason=error.strerror)
            return
        self._number = number

    def others(self) -> list[Snapshot]:
        """The latest snapshots of the other frontends."""
        return [self._read(index)[1] for index in self._others]

    def _read(self, index: int) -> tuple[int, Snapshot]:
        """Number and content of the newest complete snapshot; one that is being written is not complete."""
        newest, snapshot = 0, Snapshot()
        for slot in range(2):
            data = os.pread(self._descriptor, _SLOT_BYTES, self._offset(index, slot))
            if len(data) < _HEADER.size:
                continue
            number, size, checksum = _HEADER.unpack_from(data)
            content = data[_HEADER.size : _HEADER.size + size]
            if number > newest and len(content) == size and zlib.crc32(content, number & 0xFFFFFFFF) == checksum:
                newest, snapshot = number, self._decoder.decode(content)
        return newest, snapshot

    def _offset(self, index: int, number: int) -> int:
        return (2 * index + number % 2) * _SLOT_BYTES
