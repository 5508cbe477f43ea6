"""The memory behind the pages: what they hold, how many there are, and how long a sequence they allow."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.core.checkpoint.model_config import ModelConfig
from penstock.core.config import Config, ConfigError
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.devices.out_of_memory import NoMemoryError
from penstock.kernels.copy_pages import copy_pages

_GIB = 1 << 30
_CPU_SHARE = 0.1
_CPU_MOST = 4 * _GIB


class PageGroup(NamedTuple):
    """Layers whose keys and values have the same shape and lifetime: one page of a group holds them all."""

    layers: tuple[int, ...]
    page_size: int  # tokens of a page
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # position p needs those in (p - window, p]; None: all before it

    @property
    def num_elements(self) -> int:
        """Keys, or values, of one layer's part of a page."""
        return self.num_kv_heads * self.page_size * self.head_dim


def page_groups(model: ModelConfig, page_size: int) -> tuple[PageGroup, ...]:
    """What a model keeps. The first of several groups keeps all positions, the others have a window each.

    Where the model reads one page table alone, all layers share it and keep all positions, whatever their windows are.
    Else those with windows are in groups of as many layers as the first one has: then no part of a page is empty.
    """

    def group(layers: Sequence[int], window: int | None = None) -> PageGroup:
        return PageGroup(tuple(layers), page_size, model.num_kv_heads, model.head_dim, window)

    kept = [layer for layer, window in enumerate(model.windows) if window is None]
    if not (model.has_page_groups and kept):
        return (group(range(model.num_layers)),)
    groups = [group(kept)]
    for window in sorted({window for window in model.windows if window is not None}):
        layers = [layer for layer, its in enumerate(model.windows) if its == window]
        groups += [group(layers[i : i + len(kept)], window) for i in range(0, len(layers), len(kept))]
    return tuple(groups)


class LayerPages(NamedTuple):
    """One layer's part of all pages. What belongs to keys and values, as scales do, has its place beside them."""

    keys: Tensor  # [num_pages, Hk, page_size, D]
    values: Tensor  # the same shape
    group: int  # the place of the layer's page group among all


class KVPool:
    """One memory of equal pages, of which each belongs to the group that it was taken for.

        blocks [places, 2, pages, elements]     page 0      page 1      page 2
        place 0, keys                         | layer 0   | layer 1   | layer 0
        place 0, values                       | layer 0   | layer 1   | layer 0
        place 1, keys                         | layer 2   | layer 3   | layer 2
        ...                                     group A     group B     group A

    A group with larger heads has fewer tokens in a page, so that a page of any group takes the same bytes.
    """

    def __init__(
        self,
        groups: tuple[PageGroup, ...],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_dummy_page: bool = False,
    ) -> None:
        """All pages are zeroed: masked keys may be read, and must be finite.

        Args:
            groups: which together have each layer once.
            num_pages: that plans may name.
            dtype: of keys and values.
            device: where the pages are.
            has_dummy_page: whether there is one page more, which nobody reads.
        """
        if len({group.num_elements for group in groups}) != 1:
            raise ValueError(f"the pages of all groups must have one size, got {groups}")
        self.groups = groups
        self.num_pages = num_pages
        num_places = max(len(group.layers) for group in groups)
        shape = (num_places, 2, num_pages + has_dummy_page, groups[0].num_elements)
        if device.type == "cpu":
            # The system's own zeros: memory is taken page by page when it is first used, and start-up waits for none.
            zeros = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
            self.blocks = torch.from_numpy(zeros).view(dtype).view(shape)
        else:
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        by_layer = {
            layer: LayerPages(place[0], place[1], number)
            for number, group in enumerate(groups)
            for layer, place in zip(group.layers, self.of_group(group), strict=False)
        }
        self.layers = tuple(by_layer[layer] for layer in sorted(by_layer))

    def of_group(self, group: PageGroup) -> Tensor:
        """[places, 2, num_pages, Hk, page_size, D]: all pages as this group sees them."""
        return self.blocks.view(*self.blocks.shape[:3], group.num_kv_heads, group.page_size, group.head_dim)

    @property
    def page_size(self) -> int:
        """Tokens of a page of the first group."""
        return self.groups[0].page_size

    @property
    def dummy_page(self) -> int:
        """The page after those that plans may name, if it was asked for."""
        return self.num_pages

    def copy_pages(self, src: Tensor, dst: Tensor) -> None:
        """Copy pages `src[i]` to `dst[i]` (int32 or int64 [C], all different), of whatever groups they are."""
        copy_pages(self.blocks, src, dst)


def page_bytes(groups: Sequence[PageGroup], dtype: torch.dtype) -> int:
    """Bytes of one page over all its layers, keys and values."""
    return max(2 * len(group.layers) * group.num_elements for group in groups) * dtype.itemsize


class PoolSize(NamedTuple):
    """What the scheduler may count on."""

    num_pages: int
    max_model_len: int


def cpu_budget(config: Config, device: Device) -> int:
    """Bytes for the pool on a CPU."""
    if config.worker.cpu_kv_cache_gib:
        return int(config.worker.cpu_kv_cache_gib * _GIB)
    return min(int(device.free_memory() * _CPU_SHARE), _CPU_MOST)


def plan_pool(
    config: Config, model: ModelConfig, groups: Sequence[PageGroup], dtype: torch.dtype, budget: int
) -> PoolSize:
    """How many pages, and the longest sequence.

    Args:
        config: `num_pages` overrides the budget; an explicit `max_model_len` must fit.
        model: what its positions allow.
        groups: what a page holds.
        dtype: of keys and values.
        budget: bytes.

    Raises:
        ConfigError: if no page fits, or the wanted length does not; NoMemoryError, where more memory would help.
    """
    page_size, wanted = config.scheduler.page_size, config.model.max_model_len
    if wanted > model.max_model_len:
        raise ConfigError(f"--max-model-len {wanted} exceeds the {model.max_model_len} positions that the model has")
    one = page_bytes(groups, dtype)
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
