"""Pages in memory that processes of one host share: the reader maps the other worker's pool and copies from it.

The pool of an engine with a role is in a memory file, which has no name in any folder. Readers open it as a file
descriptor of the worker that made it. By its random title they check that it is not the file of a later process with
the same process id. The file lives as long as a process has it mapped, so a reader never touches memory that is gone.
"""

import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.ipc.messages import KVSource, Message
from penstock.parts.handover.worker.transports.transport import Pool, Read, Reader, TransportError

Bytes = npt.NDArray[np.uint8]


def _mapped(name: str) -> Bytes:
    pid, descriptor, title = name.split("/")
    path = f"/proc/{int(pid)}/fd/{int(descriptor)}"
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{title}"):
                raise TransportError("the other worker's memory is gone")
            memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)
    except OSError as error:
        raise TransportError(f"the other worker's memory cannot be mapped: {error.strerror}") from None
    return np.frombuffer(memory, dtype=np.uint8)


class SharedMemory:
    """See `Transport`."""

    def __init__(self, pool: Pool) -> None:
        """Raises TransportError if the pool is not in shared memory."""
        if not pool.shared:
            raise TransportError("the KV pool is on a GPU: only pools of CPU workers are in shared memory")
        self._pool = pool

    def place(self) -> bytes | None:
        parts, pages, _ = self._pool.blocks.shape
        return f"{self._pool.shared}/{parts}/{pages}".encode()

    def reader(self, source: KVSource, send: Callable[[Message], None]) -> Reader:
        *name, parts, pages = source.places["shared_memory"].decode().split("/")
        return _MappedReader(_mapped("/".join(name)).reshape(int(parts), int(pages), -1), self._pool.blocks)

    def close(self) -> None:
        pass


class _MappedReader:
    """Copies each run of pages with one call, directly from the other pool to this worker's."""

    polls = False

    def __init__(self, theirs: Bytes, blocks: Tensor) -> None:
        self._theirs = theirs
        self._ours = blocks.view(torch.uint8).numpy()
        if self._theirs.shape[::2] != self._ours.shape[::2]:
            raise TransportError(f"its pages are {self._theirs.shape}, ours {self._ours.shape}")
        self._done: list[int] = []

    def begin(self, read: Read) -> None:
        for theirs, ours, count in runs(read):
            self._ours[read.parts, ours : ours + count] = self._theirs[read.parts, theirs : theirs + count]
        self._done.append(read.number)

    def take_done(self) -> list[int]:
        done, self._done = self._done, []
        return done

    def take(self, number: int, data: memoryview) -> None:
        pass

    def stop(self, number: int) -> bool:
        return True

    def close(self) -> None:
        pass


def runs(read: Read) -> Iterator[tuple[int, int, int]]:
    """Divide a read into runs of pages that are consecutive on both sides, as (theirs, ours, count)."""
    theirs, ours = read.theirs, read.ours
    if not len(theirs):
        return
    breaks = np.flatnonzero((np.diff(theirs) != 1) | (np.diff(ours) != 1)) + 1
    begin = 0
    for end in [*breaks.tolist(), len(theirs)]:
        yield int(theirs[begin]), int(ours[begin]), end - begin
        begin = end
