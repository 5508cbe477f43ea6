"""Processes for tests that do something together as ranks of one host."""

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from penstock.kernels.native.ranks.group import SharedRanks
from penstock.kernels.native.ranks.memory import RankMemory
from tests.kernels.native.native_library import load_library

_CONTEXT = multiprocessing.get_context("forkserver")

Work = Callable[..., Any]


class RankProcesses:
    """A process for each rank; they end with the block."""

    def __init__(
        self,
        num_ranks: int,
        work: Work,
        *args: object,
        num_threads: int = 1,
        part_bytes: int = 256 << 10,
        timeout: float = 60,
    ) -> None:
        """`work(ranks, library, *args)` is a function of a module; its results are tensors or plain values."""
        load_library(num_threads)  # compile once, or skip
        self._pipes, self.processes = [], []
        for rank in range(num_ranks):
            ours, theirs = _CONTEXT.Pipe()
            options = (rank, num_ranks, num_threads, part_bytes, timeout)
            process = _CONTEXT.Process(target=_run, args=(theirs, options, work, args), daemon=True)
            process.start()
            self._pipes.append(ours)
            self.processes.append(process)
        address = self._pipes[0].recv()
        for pipe in self._pipes[1:]:
            pipe.send(address)

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def result(self, rank: int, seconds: float = 60) -> Any:
        """What `work` returned there, or the exception that it raised as text."""
        assert self._pipes[rank].poll(seconds), f"rank {rank} says nothing"
        return self._pipes[rank].recv()

    def results(self, seconds: float = 60) -> list[Any]:
        """Of all ranks."""
        return [self.result(rank, seconds) for rank in range(len(self.processes))]


def run_ranks(num_ranks: int, work: Work, *args: object, seconds: float = 60, **options: Any) -> list[Any]:
    """What `work` returns on each rank, within so many seconds."""
    with RankProcesses(num_ranks, work, *args, **options) as processes:
        return processes.results(seconds)


def _run(pipe: Connection, options: tuple[Any, ...], work: Work, args: tuple[object, ...]) -> None:
    rank, num_ranks, num_threads, part_bytes, timeout = options
    signal.signal(signal.SIGTERM, _on_signal)
    torch.set_num_threads(1)
    if rank == 0:
        memory = RankMemory.create(num_ranks, part_bytes)
        pipe.send(memory.address)
    else:
        memory = RankMemory.join(pipe.recv(), rank, num_ranks)
    library = load_library(num_threads)
    try:
        result = work(SharedRanks(library, memory, timeout), library, *args)
    except BaseException as error:
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    pipe.send(result)
    pipe.poll(60)  # its tensors are read from this process


def _on_signal(*_: object) -> None:
    raise SystemExit("terminated")
