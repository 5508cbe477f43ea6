"""A digest that identifies a checkpoint's weights: a checksum over every byte of every tensor.

It is a digest over a CRC-32 of each MiB, and the tensors' names, dtypes and shapes. A single changed byte always
changes the checksum of its MiB; other changes are missed once in 2^32. It does not protect against weights made to have
a certain digest. Samples of the bytes, or files' sizes and times, would be cheaper but miss changes.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from zlib import crc32

from penstock.models.files.source import StoredTensor

_PIECE = 1 << 20
_TASK = 64 << 20
"""Bytes per task of a thread."""


def weights_digest(tensors: Mapping[str, StoredTensor], num_threads: int = 1) -> str:
    """Return 16 hex digits, which are the same for the same tensors, however they are divided into files.

    A thread takes a second for 1 to 7 GB, without holding the interpreter's lock.
    """
    whole = hashlib.blake2b(digest_size=8)
    with ThreadPoolExecutor(num_threads, "penstock-digest") as pool:
        for name, stored in sorted(tensors.items()):
            whole.update(f"{name} {stored.dtype} {stored.shape} ".encode())
            data = stored.read()
            parts = [data[begin : begin + _TASK] for begin in range(0, len(data), _TASK)]
            for checksums in pool.map(_checksums, parts) if len(parts) > 1 else map(_checksums, parts):
                whole.update(checksums)
    return whole.hexdigest()


def _checksums(data: memoryview) -> bytes:
    pieces = (data[begin : begin + _PIECE] for begin in range(0, len(data), _PIECE))
    return b"".join(crc32(piece).to_bytes(4, "little") for piece in pieces)
