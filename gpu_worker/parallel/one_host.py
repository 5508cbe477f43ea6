"""Tensor ranks on one host. Within their stage they exchange numbers through shared memory."""

from collections.abc import Sequence

import structlog
import torch
from torch import Tensor

from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.native.library import Library
from penstock.kernels.native.ranks.group import DistantRanks, SharedRanks
from penstock.kernels.native.ranks.memory import NotHereError, RankMemory

log = structlog.get_logger()

_ADDRESS_BYTES = 128


class OneHost:
    """See `Ranks`. Calls that cannot use shared memory are passed to other `Ranks`."""

    def __init__(self, others: Ranks, shared: SharedRanks) -> None:
        self.place = others.place
        self.shared = shared
        self._others = others

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.is_contiguous():
            self.shared.all_reduce(x)
            return x
        sums = x.contiguous()
        self.shared.all_reduce(sums)
        return x.copy_(sums)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.shared.all_gather(x, -1)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self._others.all_to_all(x, sent, received)

    def send(self, x: Tensor, stage: int) -> None:
        self._others.send(x, stage)

    def receive(self, x: Tensor, stage: int) -> Tensor:
        return self._others.receive(x, stage)

    def close(self) -> bool:
        return self._others.close()


def in_shared_memory(ranks: Ranks, library: Library) -> Ranks:
    """The same ranks; with shared memory within a stage, if all of its ranks are on one host and see each other.

    Every rank of the stage must call this at the same time.
    """
    place = ranks.place
    if place.num_tensor == 1:
        return ranks
    memory = RankMemory.create(place.num_tensor) if place.tensor == 0 else None
    mine = "" if memory is None else memory.address
    address = bytes(_exchanged(ranks, mine.ljust(_ADDRESS_BYTES).encode())[0]).decode().strip()
    try:
        memory = memory or RankMemory.join(address, place.tensor, place.num_tensor)
        why = ""
    except NotHereError as error:
        why = str(error)
    all_are_here = not any(bytes(here)[0] for here in _exchanged(ranks, bytes([bool(why)])))
    if memory is None or not all_are_here:
        log.info("all-reduce uses gloo", reason=why or "others do not share this host's memory")
        return ranks
    return OneHost(ranks, SharedRanks(library, memory))


def program_ranks(ranks: Ranks, library: Library) -> SharedRanks | DistantRanks | None:
    """The object that sums over ranks in native programs; None for a rank that has whole layers."""
    if ranks.place.num_tensor == 1:
        return None
    return ranks.shared if isinstance(ranks, OneHost) else DistantRanks(library, ranks.all_reduce)


def _exchanged(ranks: Ranks, message: bytes) -> list[list[int]]:
    """The messages of all tensor ranks, which must have equal lengths."""
    gathered = ranks.all_gather(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    found: list[list[int]] = gathered.view(ranks.place.num_tensor, -1).tolist()
    return found
