"""The sizes of steps that the options leave to the device."""

from math import inf

import torch
from msgspec.structs import replace

from penstock.config import Config
from penstock.config.step_limits import USUAL_LEN, StepLimits
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.gpu_worker.state.kv_pool import KVType, page_bytes, page_groups
from penstock.models.description.model_config import ModelConfig


def with_limits(config: Config, part: ModelConfig, kv: KVType, device: Device, ranks: Ranks) -> Config:
    """Return the configuration with all sizes of steps. Every rank must call this once its weights are loaded."""
    return replace(config, scheduler=_limits(config, part, kv, device, ranks).fill(config.scheduler))


def _limits(config: Config, part: ModelConfig, kv: KVType, device: Device, ranks: Ranks) -> StepLimits:
    if device.torch_device.type != "cuda":
        return StepLimits.for_device(None)
    used, total = device.memory_use()
    left = int(total * config.worker.gpu_memory_utilization) - used
    if ranks.place.num_tensor > 1:  # the ranks of a stage compute together, so their steps have the same sizes
        sizes = torch.tensor([total, left], device=device.torch_device)
        total, left = (int(its) for its in ranks.all_gather(sizes).view(-1, 2).amin(0).tolist())
    page_size = StepLimits().fill(config.scheduler).page_size
    of_token = page_bytes(page_groups(part, page_size), kv) / page_size
    of_usual = USUAL_LEN * of_token + part.state_bytes
    return StepLimits.for_device(total, max(0, left) / of_usual if of_usual else inf)
