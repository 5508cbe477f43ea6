"""Ranks over torch.distributed: NCCL between GPUs, Gloo between CPUs."""

import os
import threading
from collections.abc import Sequence
from datetime import timedelta

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from penstock.config import ConfigError
from penstock.config.ranks import Place

log = structlog.get_logger()

MEETING_TIME = timedelta(minutes=10)
"""For all ranks to arrive: they may start at different times on different hosts."""

LEAVING_SECONDS = 5.0
"""For a rank to leave its group."""

SILENCE_TIME = timedelta(hours=1)
"""For a call. A dead rank is noticed by its closed connections, and a hanging one by the scheduler."""


def meet(address: str, place: Place, device: torch.device) -> "Distributed":
    """Wait until all ranks of the group are there.

    Args:
        address: `tcp://host:port`, at which rank 0 listens; or `file://path` on one host. The file must not exist
            before the first rank arrives.
        place: this rank's place.
        device: where its tensors are.

    Raises:
        ConfigError: if it is another kind of address.
    """
    num_ranks = place.num_tensor * place.num_stages
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=_store(address, place.number, num_ranks),
        rank=place.number,
        world_size=num_ranks,
        timeout=SILENCE_TIME,
        device_id=device if device.type == "cuda" else None,
    )
    return Distributed(place, device)


def _store(address: str, number: int, num_ranks: int) -> Store:
    kind, _, where = address.partition("://")
    if kind == "file":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this host, whatever its name resolves to
        store = FileStore(where, num_ranks)
        store.set_timeout(MEETING_TIME)
        return store
    host, _, port = where.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal():
        raise ConfigError(f"--rendezvous-address must be tcp://HOST:PORT, got {address!r}")
    log.warning(
        "what workers of this engine exchange over the network is neither encrypted nor authenticated: only they may "
        "reach it",
        address=address,
    )
    return TCPStore(host.strip("[]"), int(port), num_ranks, is_master=number == 0, timeout=MEETING_TIME)


class Distributed:
    """See `Ranks`."""

    def __init__(self, place: Place, device: torch.device) -> None:
        """Every rank of the group must make this object at the same time, once `torch.distributed` is set up."""
        self.place = place
        self._device = device
        stages = range(place.num_stages)
        # Every rank must take part in making each subgroup.
        groups = [
            dist.new_group([place._replace(stage=i, tensor=j).number for j in range(place.num_tensor)]) for i in stages
        ]
        self._stage = groups[place.stage]
        self._leaving: threading.Thread | None = None  # since `close`

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._stage)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.place.num_tensor)]
        dist.all_gather(parts, x.contiguous(), group=self._stage)
        return torch.cat(parts, dim=-1)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=self._stage)
        return out

    def send(self, x: Tensor, stage: int) -> None:
        dist.send(x.contiguous(), self.place._replace(stage=stage).number)

    def receive(self, x: Tensor, stage: int) -> Tensor:
        dist.recv(x, self.place._replace(stage=stage).number)
        return x

    def close(self) -> bool:
        if self._leaving is None:
            self._leaving = threading.Thread(target=self._leave, daemon=True)
            self._leaving.start()
            self._leaving.join(LEAVING_SECONDS)
        return not self._leaving.is_alive()

    def _leave(self) -> None:
        """NCCL may wait for ranks that are gone, and so may the device, in a call that they did not answer."""
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            dist.destroy_process_group()
        except RuntimeError as error:
            log.warning("rank group broken at exit", reason=str(error).partition("\n")[0])
