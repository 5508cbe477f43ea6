"""The ranks of a worker group: what the launch tells each of its workers."""

import os
from typing import NamedTuple

from msgspec.structs import replace

from penstock.core.config.options import Config
from penstock.ipc.process import options_of


class Rank(NamedTuple):
    """One worker's place in its group."""

    number: int = 0
    num_ranks: int = 1

    @property
    def name(self) -> str:
        """The process name in `ps` and in log lines."""
        return f"penstock-worker-{self.number}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command-line arguments that carry it."""
        return "--rank", str(self.number), "--num-ranks", str(self.num_ranks)

    @classmethod
    def of(cls, argv: list[str]) -> "Rank":
        """Parse the arguments; without them, it is the only rank."""
        found = options_of(argv)
        return cls(int(found.get("--rank", 0)), int(found.get("--num-ranks", 1)))

    def share(self, config: Config) -> Config:
        """Return this rank's share of the configuration, if all are on this machine: its GPU, its part of the cores."""
        worker = config.worker
        if self.num_ranks == 1:
            return config
        device = f"{worker.device}:{self.number}" if worker.device in ("auto", "cuda") else worker.device
        num_threads = worker.num_threads or max(1, len(os.sched_getaffinity(0)) // self.num_ranks)
        return replace(config, worker=replace(worker, device=device, num_threads=num_threads))


ONLY_RANK = Rank()
