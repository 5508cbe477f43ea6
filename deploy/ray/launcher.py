"""`--launcher ray`: the ranks of an engine are actors on a Ray cluster, in a placement group over the cluster's nodes.

    this machine                         nodes of the cluster
    supervisor ── RemoteWorker ─calls─▶ RankHost (actor) ── penstock.gpu_worker
    scheduler ◀──────── tcp, encrypted ─────────────────────────┘   ranks meet over tcp

All else is as usual: the death of a rank ends the group. The group is started again on nodes that have room then.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import ray
import structlog
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.config import Config, ConfigError, channel_keys
from penstock.config.addresses import with_addresses
from penstock.config.listening import bind
from penstock.config.ranks import Rank
from penstock.core.launch.child import Child
from penstock.core.launch.start import Running
from penstock.deploy.ray.rank_host import RankHost
from penstock.ipc.curve import make_key_file
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.parent import Word

log = structlog.get_logger()

_KILLED = -int(signal.SIGKILL)
_NUM_CALLS = 8  # at a time, because some calls block

_held: list[socket.socket] = []
"""These reserve the ports of schedulers between their starts."""


def addressed(config: Config, folder: Path) -> Config:
    """Connect to the cluster, and choose addresses that its nodes can reach.

    Raises:
        ConfigError: if there is no cluster, or it can never hold these ranks.
    """
    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level="warning")
        except ConnectionError:
            raise ConfigError(
                "--launcher ray finds no Ray cluster: start one with `ray start --head`, or set RAY_ADDRESS"
            ) from None
    ipc = config.ipc
    if not ipc.worker_address:
        host = str(ray.util.get_node_ip_address())
        _held.extend(bind(host, 0, is_shared=False) for _ in range(config.parallel.data_parallel_size))
        here = [f"tcp://{host}:{each.getsockname()[1]}" for each in _held]
        ipc = msgspec.structs.replace(ipc, worker_address=",".join(here[-config.parallel.data_parallel_size :]))
    if not ipc.channel_key_file:
        ipc = msgspec.structs.replace(ipc, channel_key_file=str(folder / "channel"))
        make_key_file(folder / "channel")
    return with_addresses(msgspec.structs.replace(config, ipc=ipc), folder)


def workers(config: Config, ranks: Sequence[Rank]) -> list[Child]:
    """The workers of one engine."""
    group = RankGroup(config, len(ranks))
    return [RemoteWorker(group, rank) for rank in ranks]


def gpus_per_rank(config: Config) -> float:
    """The GPUs of a node that a rank needs."""
    device = config.worker.device
    if device == "auto":
        return 1.0 if ray.is_initialized() and ray.cluster_resources().get("GPU") else 0.0
    return 0.0 if device == "cpu" else 1.0


class RankGroup:
    """The actors of one engine's ranks. New actors are made at every start of the group."""

    def __init__(self, config: Config, num_ranks: int) -> None:
        worker = config.worker
        # Ray reserves processors for a rank, but does not pin it. Without a number it would use all cores of its node.
        worker = msgspec.structs.replace(worker, num_threads=worker.num_threads or 1)
        self.config = msgspec.structs.replace(config, worker=worker)
        self.keys = channel_keys(config) or ChannelKeys(b"", b"")
        self._needs = {"CPU": float(worker.num_threads)}
        if num_gpus := gpus_per_rank(config):
            self._needs["GPU"] = num_gpus
        self._num_ranks = num_ranks
        self._placement: Any = None
        self._gathering: tuple[int, asyncio.Task[tuple[list[Any], str]]] | None = None

    async def host(self, rank: int, start: int) -> tuple[Any, str]:
        """The actor of a rank at the `start`-th start of the group, and where the ranks meet."""
        if self._gathering is None or self._gathering[0] != start:
            self._gathering = start, asyncio.create_task(self._gather())
        hosts, address = await self._gathering[1]
        return hosts[rank], address

    async def _gather(self) -> tuple[list[Any], str]:
        if self._placement is None:
            self._placement = placement_group([self._needs] * self._num_ranks, strategy="PACK")
            log.info("waiting for room in the cluster", ranks=self._num_ranks, each=self._needs)
            await self._placement.ready()
        actor = ray.remote(RankHost)
        hosts = [
            actor.options(
                num_cpus=self._needs["CPU"],
                num_gpus=self._needs.get("GPU", 0.0),
                max_concurrency=_NUM_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, bundle),
            ).remote()
            for bundle in range(self._num_ranks)
        ]
        return hosts, await hosts[0].free_address.remote()


class RemoteWorker(Child):
    """A rank under the supervisor, on any node."""

    def __init__(self, group: RankGroup, rank: Rank) -> None:
        super().__init__(rank.name, "penstock.gpu_worker", group.config, *rank._replace(cores=()).arguments)
        self._group = group
        self._rank = rank

    async def _spawn(self, arguments: list[str]) -> Running:
        host, address = await self._group.host(self._rank.number, self._num_starts)
        ipc = msgspec.structs.replace(self._config.ipc, rendezvous_address=address)
        config = msgspec.structs.replace(self._config, ipc=ipc)
        process = _RemoteProcess(host, self._on_word)
        await process.start(config, arguments, self._group.keys)
        return process

    @property
    def pids(self) -> set[int]:
        """No processes of this machine."""
        return set()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process runs."""
        if isinstance(self.process, _RemoteProcess) and self.process.returncode is None:
            self.process.signal(number)


class _RemoteProcess:
    """A process in an actor (`Running`)."""

    def __init__(self, host: Any, on_word: Callable[[Word, int], None]) -> None:
        self._host = host
        self._on_word = on_word
        self.pid = 0
        """The process id on its node."""
        self.returncode: int | None = None

    async def start(self, config: Config, arguments: list[str], keys: ChannelKeys) -> None:
        """Start the process; it counts as ended at once if its node is gone."""
        self._end = asyncio.create_task(self._follow(msgspec.json.encode(config), arguments, keys))
        self._begun = asyncio.Event()
        await self._begun.wait()

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit code."""
        return await asyncio.shield(self._end)

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal; to kill it, its actor is killed."""
        if number == signal.SIGKILL:
            ray.kill(self._host)
        else:
            self._host.signal.remote(int(number))

    async def _follow(self, config: bytes, arguments: list[str], keys: ChannelKeys) -> int:
        try:
            self.returncode = await self._run(config, arguments, keys)
        except ray.exceptions.RayError as error:  # the actor was killed, or its node is gone
            log.warning("rank actor ended", reason=str(error).splitlines()[0][:200])
            self.returncode = _KILLED
        finally:
            self._begun.set()
        with suppress(ray.exceptions.RayError):
            ray.kill(self._host)
        return self.returncode

    async def _run(self, config: bytes, arguments: list[str], keys: ChannelKeys) -> int:
        self.pid = await self._host.start.remote(config, arguments, keys)
        self._begun.set()
        rest = b""
        while said := await self._host.next_words.remote():
            *lines, rest = (rest + said).split(b"\n")
            for line in filter(None, lines):
                word, _, number = line.decode().partition(" ")
                self._on_word(Word(word), int(number or 0))
        return int(await self._host.wait.remote())
