"""The memory behind the pages: how many there are, and how long a sequence they allow."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.core.checkpoint.model_config import ModelConfig
from penstock.core.config import Config, ConfigError
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.devices.out_of_memory import NoMemoryError

_GIB = 1 << 30
_CPU_SHARE = 0.1
_CPU_MOST = 4 * _GIB


class PoolSize(NamedTuple):
    """What the scheduler may count on."""

    num_pages: int
    max_model_len: int


def page_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * model.num_layers * model.num_kv_heads * page_size * model.head_dim * dtype.itemsize


def cpu_budget(config: Config, device: Device) -> int:
    """Bytes for the pool on a CPU."""
    if config.worker.cpu_kv_cache_gib:
        return int(config.worker.cpu_kv_cache_gib * _GIB)
    return min(int(device.free_memory() * _CPU_SHARE), _CPU_MOST)


def plan_pool(config: Config, model: ModelConfig, dtype: torch.dtype, budget: int) -> PoolSize:
    """How many pages, and the longest sequence.

    Args:
        config: `num_pages` overrides the budget; an explicit `max_model_len` must fit.
        model: what a page holds, and what its positions allow.
        dtype: of keys and values.
        budget: bytes.

    Raises:
        ConfigError: if no page fits, or the wanted length does not; NoMemoryError, where more memory would help.
    """
    page_size, wanted = config.scheduler.page_size, config.model.max_model_len
    if wanted > model.max_model_len:
        raise ConfigError(f"--max-model-len {wanted} exceeds the {model.max_model_len} positions that the model has")
    one = page_bytes(model, page_size, dtype)
    num_pages = config.worker.num_pages or budget // one
    raisers = "--num-pages, --cpu-kv-cache-gib or --gpu-memory-utilization"
    if num_pages < 1:
        raise NoMemoryError(
            f"no KV page of {one / 2**20:.1f} MiB fits the {max(0, budget) / _GIB:.2f} GiB left for pages; "
            f"raise {raisers}"
        )
    num_tokens = num_pages * page_size
    if wanted > num_tokens:
        error = ConfigError if config.worker.num_pages else NoMemoryError
        raise error(f"--max-model-len {wanted} exceeds the KV pool's {num_tokens} tokens; lower it, or raise {raisers}")
    return PoolSize(num_pages, wanted or min(model.max_model_len, num_tokens))


def allocate(model: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: Device) -> Tensor:
    """[num_layers, 2, num_pages, Hk, page_size, D], zeroed: masked keys may be read, and must be finite."""
    shape = (model.num_layers, 2, num_pages, model.num_kv_heads, page_size, model.head_dim)
    if device.torch_device.type == "cpu":
        # The system's own zeros: memory is taken page by page when it is first used, and start-up waits for none of it.
        zeros = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(zeros).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device.torch_device)
