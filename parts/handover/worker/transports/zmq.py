"""Pages over the same socket as the messages about ready layers. It works, encrypted, for engines on different hosts.

Reads are short, and few are in flight at a time, so neither side buffers much more than what is being sent.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import KVSource, Message
from penstock.parts.handover.messages import ReadKV
from penstock.parts.handover.worker.transports.transport import Pool, Read, Reader, TransportError

MAX_READ_BYTES, MAX_UNDER_WAY = 4 << 20, 4


class Sockets:
    """See `Transport`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._numbers = count()  # of pieces, never reused: pieces for a closed reader may still arrive

    def place(self) -> bytes | None:
        return b""

    def reader(self, source: KVSource, send: Callable[[Message], None]) -> Reader:
        return _SocketReader(self._pool, send, self._numbers)

    def close(self) -> None:
        pass


class _SocketReader:
    """Requests a few pages at a time, and writes the received bytes to their pages."""

    polls = False

    def __init__(self, pool: Pool, send: Callable[[Message], None], numbers: Iterator[int]) -> None:
        self._pool = pool
        self._blocks = pool.blocks
        self._send = send
        self._due: deque[tuple[int, Read]] = deque()
        self._under_way: dict[int, Read] = {}
        self._num_left: dict[int, int] = {}  # by read: pieces that have not arrived
        self._numbers = numbers
        self._done: list[int] = []

    def begin(self, read: Read) -> None:
        num_parts = read.parts.stop - read.parts.start
        most = max(1, MAX_READ_BYTES // (num_parts * self._blocks.shape[2] * self._blocks.element_size()))
        starts = range(0, len(read.theirs), most)
        self._num_left[read.number] = len(starts)
        for start in starts:
            piece = read._replace(theirs=read.theirs[start : start + most], ours=read.ours[start : start + most])
            self._due.append((next(self._numbers), piece))
        self._ask()

    def _ask(self) -> None:
        while self._due and len(self._under_way) < MAX_UNDER_WAY:
            number, piece = self._due.popleft()
            self._under_way[number] = piece
            self._send(ReadKV(number, piece.parts.start, piece.parts.stop, pack_int32(piece.theirs.tolist())))

    @torch.inference_mode()
    def take(self, number: int, data: memoryview) -> None:
        piece = self._under_way.pop(number, None)
        if piece is None:
            return
        shape = (piece.parts.stop - piece.parts.start, len(piece.ours), self._blocks.shape[2])
        if len(data) != int(np.prod(shape)) * self._blocks.element_size():
            raise TransportError(f"{len(data)} bytes came for {shape[1]} pages")
        came = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(self._blocks.dtype).view(shape)
        self._pool.copy(partial(self._write, piece, came))
        self._num_left[piece.number] -= 1
        if not self._num_left[piece.number]:
            del self._num_left[piece.number]
            self._done.append(piece.number)
        self._ask()

    def _write(self, piece: Read, came: Tensor) -> None:
        ours = torch.from_numpy(piece.ours.astype(np.int64)).to(self._blocks.device)
        self._blocks[piece.parts].index_copy_(1, ours, came.to(self._blocks.device))

    def take_done(self) -> list[int]:
        done, self._done = self._done, []
        return done

    def stop(self, number: int) -> bool:
        self._due = deque(each for each in self._due if each[1].number != number)
        self._under_way = {piece: read for piece, read in self._under_way.items() if read.number != number}
        self._num_left.pop(number, None)
        self._ask()
        return True

    def close(self) -> None:
        self._due.clear()
        self._under_way.clear()
