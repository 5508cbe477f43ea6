"""The interface of transports."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.gpu_worker.devices.device import Lane
from penstock.ipc.messages import KVSource, Message

PageIds = npt.NDArray[np.int32]


class TransportError(Exception):
    """A transport cannot be used, or has failed; the message says why."""


class Read(NamedTuple):
    """A read of parts of some pages, into as many pages of this worker."""

    number: int  # unique among the reads of a reader
    parts: slice  # of `KVPool.blocks`
    theirs: PageIds
    ours: PageIds


class Reader(Protocol):
    """Reads the pages of one rank of another engine, all from one thread."""

    def begin(self, read: Read) -> None:
        """Begin a read.

        Raises:
            TransportError: if that is impossible.
        """

    def take_done(self) -> list[int]:
        """Return the numbers of the reads that have ended since the last call.

        Raises:
            TransportError: if a read has failed.
        """

    def take(self, number: int, data: memoryview) -> None:
        """Take bytes that have arrived over the socket, for transports that use it."""

    def stop(self, number: int) -> bool:
        """End a read that is not wanted any more, so that nothing is written for it after this returns.

        Returns False if only `close` can make sure of that.
        """

    @property
    def polls(self) -> bool:
        """Whether reads can end without a message on the socket."""

    def close(self) -> None:
        """Close the reader; nothing is written to this worker's pages after this returns."""


class Transport(Protocol):
    """One way of reading, in one worker."""

    def place(self) -> bytes | None:
        """Return what readers must know to read this worker's pages; None if they cannot be read in this way."""

    def reader(self, source: KVSource, send: Callable[[Message], None]) -> Reader:
        """Return a reader of another rank's pages. `send` sends over the socket to that rank.

        Raises:
            TransportError: if the rank's pages cannot be reached.
        """

    def close(self) -> None:
        """Release the transport's resources."""


class Pool(NamedTuple):
    """A KV pool's memory, for transports."""

    blocks: Tensor  # [parts, pages, elements]
    shared: str  # the name by which other processes open the shared memory; empty if it is not shared
    lane: Lane | None = None
    """For copies beside the steps: pages are handed over only before or after the steps that use them. None: work is
    done at once."""

    def copy(self, work: Callable[[], None]) -> None:
        """Read or write pages with tensor operations, and wait for these alone."""
        if self.lane is None:
            work()
            return
        self.lane.run(work)
        self.lane.mark().wait()
