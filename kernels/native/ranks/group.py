"""One rank's view of its group, and what it exchanges with the others (`meeting.h`, `exchange.h`)."""

import ctypes
import os
import select
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.native.library import Library
from penstock.kernels.native.ranks.memory import RankMemory

_TIMEOUT = 120.0
"""Seconds that a rank waits for another one that is alive; the supervisor of the processes notices sooner."""

_Ask = ctypes.CFUNCTYPE(c_int)


class RankGroupStruct(ctypes.Structure):
    """As RankGroup in meeting.h."""

    _fields_ = (
        ("memory", c_void_p),
        ("ask", _Ask),
        *((name, c_int32) for name in ("rank", "num_ranks", "part_bytes", "missed")),
        *(("waited", ctypes.c_double), ("numbers", c_void_p), ("num_numbers", c_int64)),
        *((name, c_uint32) for name in ("num_arrivals", "num_exchanges")),
    )


class RankLostError(RuntimeError):
    """Another rank has died or does not arrive, so the group cannot go on."""


class SharedRanks:
    """The ranks of one host. All call the same methods in the same order. Not thread-safe."""

    def __init__(self, library: Library, memory: RankMemory, timeout: float = _TIMEOUT) -> None:
        """Wait until all ranks are here.

        Args:
            library: the kernels; their threads take part.
            memory: this rank's mapping.
            timeout: seconds that any call waits for a rank that is alive.

        Raises:
            RankLostError: if a rank does not arrive.
        """
        self._functions = library.functions
        self._library = library
        self._memory = memory
        self._timeout = timeout
        self._watched: dict[int, int] = {}  # rank -> file descriptor, readable once the rank's process has ended
        self._view = (ctypes.c_char * len(memory.bytes)).from_buffer(memory.bytes)  # gives the address
        self.struct = RankGroupStruct(
            memory=ctypes.addressof(self._view),
            ask=_asked(library, self._look),
            rank=memory.rank,
            num_ranks=memory.num_ranks,
            part_bytes=memory.part_bytes,
        )
        """It must outlive what points to it."""
        self._functions.penstock_meet(ctypes.byref(self.struct))
        memory.close_file()
        self._watched = {rank: os.pidfd_open(pid) for rank, pid in enumerate(memory.pids()) if rank != memory.rank}

    def all_reduce(self, x: Tensor) -> None:
        """Replace x, contiguous, by the sum over the ranks.

        fp32 is added in the order of the ranks; other floats are added as fp32, and rounded once.
        """
        sums = x if x.dtype == torch.float32 else x.float()
        self._functions.penstock_add_up(ctypes.byref(self.struct), c_void_p(sums.data_ptr()), c_int64(sums.numel()))
        if sums is not x:
            x.copy_(sums)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """Join the ranks' tensors.

        Args:
            x: this rank's tensor.
            dim: the dimension along which tensors are joined.
            sizes: of each rank's tensor in this dimension; None: all are as large as x.
        """
        dim %= x.ndim
        sizes = [x.shape[dim]] * self.struct.num_ranks if sizes is None else sizes
        x = x.contiguous()
        out = torch.empty(*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :], dtype=x.dtype)
        inner = x.shape[dim + 1 :].numel() * x.itemsize
        widths = np.array([size * inner for size in sizes], dtype=np.int64)
        self._functions.penstock_gather(
            *(ctypes.byref(self.struct), c_void_p(x.data_ptr()), c_int64(x.shape[:dim].numel())),
            *(c_void_p(widths.ctypes.data), c_void_p(out.data_ptr())),
        )
        return out

    def broadcast(self, x: Tensor, source: int) -> None:
        """Replace x, contiguous, by the tensor of rank `source`."""
        self._functions.penstock_broadcast(
            *(ctypes.byref(self.struct), c_void_p(x.data_ptr()), c_int64(x.nbytes), c_int(source))
        )

    def _look(self) -> None:
        rank, waited = self.struct.missed, self.struct.waited
        if rank in self._watched and _has_ended(self._watched[rank]):
            raise RankLostError(f"rank {rank} has died")
        if waited > self._timeout:
            raise RankLostError(f"rank {rank} has not come for {waited:.0f} seconds")


class DistantRanks:
    """For programs of ranks on several hosts: a callback computes the sums."""

    def __init__(self, library: Library, add_up: Callable[[Tensor], object]) -> None:
        """`add_up` replaces its argument, fp32[n], by the sum over the ranks."""
        self._add_up = add_up
        self.struct = RankGroupStruct(ask=_asked(library, self._reduce))
        """It must outlive what points to it."""

    def _reduce(self) -> None:
        view = (ctypes.c_float * self.struct.num_numbers).from_address(self.struct.numbers)
        self._add_up(torch.frombuffer(view, dtype=torch.float32))


def _asked(library: Library, do: Callable[[], None]) -> Any:
    """Wrap a function without result as a C function. An exception ends the library call that has asked, and is raised.

    A signal handler may raise, too, and it runs as soon as any Python code runs. In a function that would be before the
    first line, outside of any `try`. A generator resumes at its last `yield`, which is inside the `try`.
    """

    def answers() -> Iterator[int]:
        answer = 1
        while True:
            try:
                yield answer
                answer = 1
                do()
            except GeneratorExit:
                raise
            except BaseException as error:
                library.reason = error
                answer = 0

    made = answers()
    next(made)
    return _Ask(made.__next__)


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))
