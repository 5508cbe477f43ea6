"""What a transport is, and which ones there are."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.ipc.messages import KVSource, Message

PageIds = npt.NDArray[np.int32]


class TransportError(Exception):
    """A transport cannot be used, or has failed; the message says why."""


class Read(NamedTuple):
    """Parts of some pages, to be read into as many of our own."""

    number: int  # unique among the reads of a reader
    parts: slice  # of `KVPool.blocks`
    theirs: PageIds
    ours: PageIds


class Reader(Protocol):
    """Reads the pages of one rank of another engine, all from one thread."""

    def begin(self, read: Read) -> None:
        """Begin to read.

        Raises:
            TransportError: if it cannot.
        """

    def take_done(self) -> list[int]:
        """Return the numbers of the reads that have ended since the last call.

        Raises:
            TransportError: if one has failed.
        """

    def take(self, number: int, data: memoryview) -> None:
        """Bytes have come over the socket, if that is how they come."""

    def stop(self, number: int) -> bool:
        """End a read that is not wanted any more: nothing is written for it after this returns.

        Returns False if only `close` can see to that.
        """

    @property
    def polls(self) -> bool:
        """Whether reads end without anything that the socket tells."""

    def close(self) -> None:
        """Nothing is written to our pages after this returns."""


class Transport(Protocol):
    """One way of reading, in one worker."""

    def place(self) -> bytes | None:
        """Return what readers must know to read our pages; None if these cannot be read in this way."""

    def reader(self, source: KVSource, send: Callable[[Message], None]) -> Reader:
        """Return a reader of another rank's pages. `send` sends over the socket to it.

        Raises:
            TransportError: if its pages cannot be reached.
        """

    def close(self) -> None:
        """Give up what it holds."""


class Pool(NamedTuple):
    """A KV pool's memory, as transports see it."""

    blocks: Tensor  # [parts, pages, elements]
    shared: str  # of shared memory, what others open it by; empty if it is not shared
