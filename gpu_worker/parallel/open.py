"""From a configuration to a rank's view of its group."""

import torch

from penstock.core.config import Config
from penstock.core.config.ranks import Place
from penstock.gpu_worker.parallel.alone import Alone
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.native.library import Library


def open_ranks(config: Config, number: int, device: torch.device, library: Library | None = None) -> Ranks:
    """Wait for the other ranks, if there are any.

    Args:
        config: with the size of the group, and the address.
        number: the rank.
        device: where its tensors are.
        library: the native CPU kernels, if these compute: ranks of one host then share memory.

    Raises:
        ConfigError: if they cannot meet at the address.
    """
    place = Place.of(number, config.parallel)
    if place.is_alone:
        return Alone()
    from penstock.gpu_worker.parallel.distributed import meet  # takes time that one worker need not spend

    ranks = meet(config.ipc.rendezvous_address, place, device)
    if library is None:
        return ranks
    from penstock.gpu_worker.parallel.one_host import in_shared_memory

    return in_shared_memory(ranks, library)
