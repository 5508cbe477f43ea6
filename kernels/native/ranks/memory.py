"""Memory that the ranks of one host share. It has no name in any folder, so nothing is left when processes die."""

import mmap
import os
import secrets
import struct
from typing import Self

_HEADER_BYTES = 4096  # bytes for all seats, as kPartsBegin in meeting.h
_SEAT_BYTES = 128  # as Seat in meeting.h: the number of arrivals, counted by C++; after it, what this module writes
_PID_AT = 64  # in a seat
_TOKEN_AT = _HEADER_BYTES - 16
_PART_BYTES = 512 << 10  # a few of them fit in the cache of a core
MAX_RANKS = _TOKEN_AT // _SEAT_BYTES - 1  # one seat is for sleepers


class NotHereError(Exception):
    """The memory is not on this host, or this process cannot see it."""


class RankMemory:
    """One rank's mapping of the memory."""

    def __init__(self, file: int, rank: int, num_ranks: int, part_bytes: int) -> None:
        if num_ranks > MAX_RANKS:
            raise ValueError(f"at most {MAX_RANKS} ranks share memory, got {num_ranks}")
        self._file = file
        self.rank, self.num_ranks, self.part_bytes = rank, num_ranks, part_bytes
        self.bytes = mmap.mmap(file, num_bytes(num_ranks, part_bytes))
        self._pack("i", rank * _SEAT_BYTES + _PID_AT, os.getpid())

    @classmethod
    def create(cls, num_ranks: int, part_bytes: int = _PART_BYTES) -> Self:
        """Make the memory, for parts that are multiples of 4,096 bytes; this is rank 0."""
        file = os.memfd_create("penstock-ranks")
        os.ftruncate(file, num_bytes(num_ranks, part_bytes))
        made = cls(file, 0, num_ranks, part_bytes)
        made.bytes[_TOKEN_AT:_HEADER_BYTES] = secrets.token_bytes(16)
        return made

    @classmethod
    def join(cls, address: str, rank: int, num_ranks: int) -> Self:
        """Map the memory that rank 0 has made.

        Raises:
            NotHereError: if this process cannot map it.
        """
        pid, number, part_bytes, token = address.split(":")
        try:
            file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise NotHereError(f"the memory of process {pid} cannot be opened: {error.strerror}") from None
        # A process on another host may have the same process id.
        has_size = os.fstat(file).st_size == num_bytes(num_ranks, int(part_bytes))
        if not has_size or os.pread(file, 16, _TOKEN_AT).hex() != token:
            os.close(file)
            raise NotHereError(f"process {pid} is another one here")
        return cls(file, rank, num_ranks, int(part_bytes))

    @property
    def address(self) -> str:
        """The address that the other ranks pass to `join`."""
        token = self.bytes[_TOKEN_AT:_HEADER_BYTES].hex()
        return f"{os.getpid()}:{self._file}:{self.part_bytes}:{token}"

    def pids(self) -> list[int]:
        """The processes of all ranks, once they have joined."""
        return [
            int(struct.unpack_from("i", self.bytes, rank * _SEAT_BYTES + _PID_AT)[0]) for rank in range(self.num_ranks)
        ]

    def close_file(self) -> None:
        """Close the file once all ranks have joined; the mapping stays."""
        os.close(self._file)

    def _pack(self, form: str, at: int, number: int) -> None:
        struct.pack_into(form, self.bytes, at, number)


def num_bytes(num_ranks: int, part_bytes: int) -> int:
    """Bytes of the memory for a group: seats, and two parts for each rank."""
    return _HEADER_BYTES + 2 * num_ranks * part_bytes
