"""From a configuration to a rank's view of its group."""

import torch

from penstock.config import Config
from penstock.config.ranks import Place
from penstock.gpu_worker.parallel.alone import Alone
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.native.library import Library


def open_ranks(config: Config, number: int, device: torch.device, library: Library | None = None) -> Ranks:
    """Wait for the other ranks, if there are any.

    Args:
        config: has the size of the group, and the address.
        number: this rank's number.
        device: where its tensors are.
        library: the native CPU kernels, if they compute. Then ranks on one host share memory.

    Raises:
        ConfigError: if the ranks cannot meet at the address.
    """
    place = Place.of(number, config.parallel)
    if place.is_alone:
        return Alone()
    from penstock.gpu_worker.parallel.distributed import meet  # slow to import, and not needed by a single worker

    ranks = meet(config.ipc.rendezvous_address, place, device)
    if library is None:
        return ranks
    from penstock.gpu_worker.parallel.one_host import in_shared_memory

    return in_shared_memory(ranks, library)
