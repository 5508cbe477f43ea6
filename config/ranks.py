"""The ranks of a worker group: what the launch tells each of its workers, and which part of a model each one has."""

import os
from typing import NamedTuple

from msgspec.structs import replace

from penstock.config.cores import cores_of_worker
from penstock.config.engines import numbered
from penstock.config.groups.parallel import ParallelOptions
from penstock.config.options import Config, ConfigError
from penstock.ipc.process import options_of


class Place(NamedTuple):
    """What a rank computes: its part of each layer, of the layers of its stage."""

    tensor: int = 0
    num_tensor: int = 1
    stage: int = 0
    num_stages: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether it has the whole model."""
        return self.num_tensor == self.num_stages == 1

    @property
    def is_first_stage(self) -> bool:
        """Whether it begins with token ids."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has logits, and draws tokens."""
        return self.stage == self.num_stages - 1

    @property
    def answers(self) -> bool:
        """Whether the group's results are this rank's."""
        return self.is_last_stage and self.tensor == 0

    @property
    def number(self) -> int:
        """The rank: tensor ranks of a stage follow each other."""
        return self.stage * self.num_tensor + self.tensor

    @classmethod
    def of(cls, number: int, options: ParallelOptions) -> "Place":
        """The place of a rank."""
        num_tensor = options.tensor_parallel_size
        return cls(number % num_tensor, num_tensor, number // num_tensor, options.pipeline_parallel_size)


class Rank(NamedTuple):
    """One worker's place in its group, and its engine's among those of the launch."""

    number: int = 0
    num_ranks: int = 1
    engine: int = 0
    num_engines: int = 1
    cores: tuple[int, ...] = ()
    """Those that it keeps to if it computes on the CPU; empty: any."""

    @property
    def name(self) -> str:
        """The process name in `ps` and in log lines."""
        return f"{numbered('penstock-worker', self.engine, self.num_engines)}-{self.number}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command-line arguments that carry it."""
        of_group = "--rank", str(self.number), "--num-ranks", str(self.num_ranks)
        cores = ("--cores", ",".join(map(str, self.cores))) if self.cores else ()
        return *of_group, "--engine", str(self.engine), "--num-engines", str(self.num_engines), *cores

    @classmethod
    def of(cls, argv: list[str]) -> "Rank":
        """Parse the arguments; without them, it is the only rank."""
        found = options_of(argv)
        group = int(found.get("--rank", 0)), int(found.get("--num-ranks", 1))
        cores = tuple(int(core) for core in found.get("--cores", "").split(",") if core)
        return cls(*group, int(found.get("--engine", 0)), int(found.get("--num-engines", 1)), cores)

    @property
    def worker(self) -> int:
        """Its number among the workers of all engines."""
        return self.engine * self.num_ranks + self.number

    @property
    def num_workers(self) -> int:
        """The number of workers of all engines."""
        return self.num_ranks * self.num_engines

    def on_this_machine(self) -> "Rank":
        """Return this rank with the cores to which it is pinned, if all workers are on this machine."""
        return self._replace(cores=() if self.num_workers == 1 else cores_of_worker(self.worker, self.num_workers))

    def share(self, config: Config) -> Config:
        """Return this rank's share of the configuration, if all are on this machine: its GPU, its part of the cores."""
        worker = config.worker
        if self.num_workers == 1:
            return config
        device = f"{worker.device}:{self.worker}" if worker.device in ("auto", "cuda") else worker.device
        num_cores = len(self.cores) or len(os.sched_getaffinity(0)) // self.num_workers
        num_threads = worker.num_threads or max(1, num_cores)
        return replace(config, worker=replace(worker, device=device, num_threads=num_threads))


ONLY_RANK = Rank()


def of_group(number: int, config: Config) -> Rank:
    """The rank of a worker that is started on its own.

    Raises:
        ConfigError: if there is no such rank, or nothing says where the ranks meet.
    """
    num_ranks = config.parallel.num_ranks
    if not 0 <= number < num_ranks:
        raise ConfigError(f"--rank {number}: this engine has {num_ranks} workers, counted from 0")
    if num_ranks > 1 and not config.ipc.rendezvous_address:
        raise ConfigError("give --rendezvous-address or --runtime-dir: where the workers of an engine meet")
    return Rank(number, num_ranks)
