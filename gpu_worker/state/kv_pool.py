"""The memory behind the pages: what a page holds, how many there are, and the longest sequence that they allow."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config import Config, ConfigError
from penstock.gpu_worker.devices.cpu import host_zeros, shared_zeros
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.devices.out_of_memory import NoMemoryError
from penstock.gpu_worker.state.state_slots import StateSlots
from penstock.ipc.messages import WindowGroup
from penstock.kernels.attention.copy_pages import copy_pages
from penstock.kernels.attention.kv_quantization import KVFormat, PageLayout
from penstock.models.description.decoder import Attention, Decoder
from penstock.models.description.model_config import KVShape, ModelConfig
from penstock.models.page_limits import longest_sequence
from penstock.models.shards.shard import shard_of
from penstock.models.state_limits import num_empty_pages

KVType = torch.dtype | KVFormat
"""What keys and values are stored as."""

_GIB = 1 << 30
_LONG = 4  # windows per longest sequence; with fewer, several page tables would cost more than they save
_CPU_SHARE = 0.1
_CPU_MOST = 4 * _GIB


class PageGroup(NamedTuple):
    """Layers whose keys and values have the same shape and lifetime: each page of the group holds all these layers."""

    layers: tuple[int, ...]
    page_size: int  # tokens per page
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # position p needs the positions in (p - window, p]; None: all before it
    has_values: bool = True  # False: values are the first part of the keys

    @property
    def num_elements(self) -> int:
        """Elements of the keys of one layer in a page. The values have as many, or none of their own."""
        return self.num_kv_heads * self.page_size * self.head_dim

    @property
    def num_parts(self) -> int:
        """The number of parts in a page: keys and values of each layer."""
        return len(self.layers) * (1 + self.has_values)

    def bytes_per_token(self, kv: KVType) -> int:
        """Bytes of one position over all layers of the group."""
        of_head = kv.head_bytes(self.head_dim) if isinstance(kv, KVFormat) else self.head_dim * kv.itemsize
        return self.num_parts * self.num_kv_heads * of_head


def page_groups(model: ModelConfig, page_size: int) -> tuple[PageGroup, ...]:
    """Page groups of a model, or of a rank's part.

    The first of several groups keeps all positions. Each of the others has a window.

    A group with a window has as many layers as fit into a page of the first group's size. So no part of a page is
    empty, except in the last group of each window. Groups with larger heads have fewer tokens in a page. Cached
    prefixes are found by the first group. So if all layers have windows and sequences can be much longer, every eighth
    layer keeps all positions nevertheless. If no sequence can be much longer, all layers keep all positions.

    Raises:
        ConfigError: layers that must be in one group keep different shapes, or no number of tokens makes pages equal.
    """
    shapes, own = _shapes_of_all_stages(model)
    if not shapes:
        return (PageGroup((), page_size, 1, 1, has_values=False),)  # its pages hold nothing; they only count tokens
    kept = [layer for layer, shape in enumerate(shapes) if shape.window is None]
    if not kept and max(shape.window or 0 for shape in shapes) * _LONG <= model.max_model_len:
        kept = list(range(0, len(shapes), 8))
    kept = kept or list(range(len(shapes)))
    first = _group(kept, shapes, page_size)
    groups = [first]
    others = [layer for layer in range(len(shapes)) if layer not in kept]
    for shape in sorted({shapes[layer] for layer in others}, key=lambda its: (its.window or 0, its)):
        layers = [layer for layer in others if shapes[layer] == shape]
        width = shape.num_heads * shape.key_dim
        if first.num_elements % width:
            raise ConfigError(
                f"--page-size {page_size} does not suit this model: some layers keep "
                f"{first.num_elements // page_size} numbers of a token, others {width}"
            )
        most = first.num_parts // (1 + bool(shape.value_dim))
        groups += [
            _group(layers[i : i + most], shapes, first.num_elements // width, shape.window)
            for i in range(0, len(layers), most)
        ]
    return tuple(
        group._replace(layers=tuple(layer - own.start for layer in group.layers if layer in own)) for group in groups
    )


def one_group(model: ModelConfig, page_size: int) -> PageGroup:
    """All layers of a whole model in one group, which keeps all positions even of layers with windows.

    Raises:
        ConfigError: layers keep different amounts of data for a position.
    """
    return _group(list(range(model.num_layers)), model.kv, page_size)


def _shapes_of_all_stages(model: ModelConfig) -> tuple[Sequence[KVShape], range]:
    """The shapes that all layers keep on ranks like this one, and the range of layers in this stage.

    Page tables are the same on all stages, so page groups must be, too. A group may have no layers in a stage.
    """
    if not isinstance(model, Decoder) or model.shard is None or model.shard.place.num_stages == 1:
        return model.kv, range(model.num_layers)
    shard = model.shard
    every_layer = shard_of(shard.whole, shard.place._replace(stage=0, num_stages=1))
    assert isinstance(every_layer, Decoder)
    keeps = [layer.attention for layer in shard.whole.layers]
    first = sum(
        not (isinstance(mixer, Attention) and mixer.shares_kv_of is not None) for mixer in keeps[: shard.layers[0]]
    )
    return every_layer.kv, range(first, first + model.num_layers)


def _group(layers: list[int], shapes: Sequence[KVShape], page_size: int, window: int | None = None) -> PageGroup:
    kinds = {shapes[layer]._replace(window=None) for layer in layers}
    if len(kinds) > 1:
        raise ConfigError("layers that keep all positions, but different numbers of each, are not supported")
    shape = kinds.pop()
    return PageGroup(tuple(layers), page_size, shape.num_heads, shape.key_dim, window, bool(shape.value_dim))


class LayerPages(NamedTuple):
    """One layer's part of all pages."""

    keys: Tensor  # [num_pages, Hk, page_size, D]; if quantized, uint8[num_pages, Hk, head bytes]
    values: Tensor  # the same shape; the keys themselves, if values are their first part
    group: int  # index of the layer's page group
    layout: PageLayout | None = None  # of quantized pages


class KVPool:
    """One block of memory with pages of equal size. Each page belongs to the group that allocated it.

        blocks [parts, pages, elements]   page 0             page 1             page 2
        part 0                          | keys of layer 0  | keys of layer 1  | keys of layer 0
        part 1                          | its values       | its values       | its values
        part 2                          | keys of layer 2  | keys of layer 3  | keys of layer 2
        ...                               group A            group B            group A

    A group with larger heads has fewer tokens per page, so the pages of all groups have the same number of bytes. A
    layer whose values are the first part of its keys has one part. The elements of quantized pages are bytes. Groups
    may need different numbers of bytes for their scales; then the pages of some groups are not quite full.
    """

    def __init__(
        self,
        groups: tuple[PageGroup, ...],
        num_pages: int,
        kv: KVType,
        device: torch.device,
        *,
        has_dummy_page: bool = False,
        is_shared: bool = False,
        states: StateSlots | None = None,
    ) -> None:
        """All pages are zeroed, because masked keys may be read and must be finite.

        Args:
            groups: page groups that together contain each layer once.
            num_pages: pages that plans may use.
            kv: what keys and values are stored as.
            device: where the pages are.
            has_dummy_page: whether there is one more page, whose content is never used.
            is_shared: whether other processes can read the pool, if it is on a CPU.
            states: what layers keep for each row instead of each position.
        """
        if len({group.num_elements for group in groups}) != 1:
            raise ValueError(f"the pages of all groups must have the same size, got {groups}")
        self.groups = groups
        self.states = states
        self.num_pages = num_pages
        self.kv = kv
        dtype = torch.uint8 if isinstance(kv, KVFormat) else kv
        num_parts = max(1, *(group.num_parts for group in groups))
        shape = (num_parts, num_pages + has_dummy_page, _part_bytes(groups, kv) // dtype.itemsize)
        self.shared = ""  # the name by which other processes open it
        if device.type == "cpu" and is_shared:
            self.blocks, self.shared = shared_zeros(shape, dtype)
        elif device.type == "cpu":
            self.blocks = host_zeros(shape, dtype)
        else:
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        by_layer: dict[int, LayerPages] = {}
        for number, group in enumerate(groups):
            parts = self.of_group(group)
            step = 1 + group.has_values
            layout = self.layout_of(group)
            for place, layer in enumerate(group.layers):
                keys, values = parts[place * step], parts[place * step + group.has_values]
                by_layer[layer] = LayerPages(keys, values if group.has_values else keys, number, layout)
        self.layers = tuple(by_layer[layer] for layer in sorted(by_layer))

    def of_group(self, group: PageGroup) -> Tensor:
        """All pages as this group sees them: [parts, num_pages, Hk, page_size, D]; quantized [..., Hk, head bytes]."""
        if isinstance(self.kv, KVFormat):
            return self.blocks.view(*self.blocks.shape[:2], group.num_kv_heads, -1)
        return self.blocks.view(*self.blocks.shape[:2], group.num_kv_heads, group.page_size, group.head_dim)

    def layout_of(self, group: PageGroup) -> PageLayout | None:
        """The layout of the group's pages, if they are quantized."""
        return PageLayout(self.kv, group.page_size, group.head_dim) if isinstance(self.kv, KVFormat) else None

    @property
    def page_size(self) -> int:
        """Tokens of a page of the first group."""
        return self.groups[0].page_size

    @property
    def dummy_page(self) -> int:
        """The page after those that plans may use, if it was requested."""
        return self.num_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all its layers."""
        return page_bytes(self.groups, self.kv)

    def copy_pages(self, src: Tensor, dst: Tensor) -> None:
        """Copy pages `src[i]` to `dst[i]` (int32 or int64 [C], all different), whatever their groups."""
        copy_pages(self.blocks, src, dst)


def page_bytes(groups: Sequence[PageGroup], kv: KVType) -> int:
    """Bytes of one page: keys and values of all its layers."""
    return max(1, *(group.num_parts for group in groups)) * _part_bytes(groups, kv)


def _part_bytes(groups: Sequence[PageGroup], kv: KVType) -> int:
    """Bytes of the keys of one layer in a page.

    In quantized pages each head has the same number of bytes, a multiple of 4, because two fp16 are loaded at once.
    """
    if not isinstance(kv, KVFormat):
        return groups[0].num_elements * kv.itemsize
    most = max(group.num_kv_heads * group.page_size * kv.head_bytes(group.head_dim) for group in groups)
    unit = 4 * math.lcm(*(group.num_kv_heads for group in groups))
    return -(-most // unit) * unit


def kv_name(kv: KVType) -> str:
    """The name of the type in options and logs."""
    return kv.name if isinstance(kv, KVFormat) else str(kv).removeprefix("torch.")


def window_groups(groups: Sequence[PageGroup]) -> tuple[WindowGroup, ...]:
    """The groups beside the first one, as the scheduler knows them."""
    return tuple(WindowGroup(group.page_size, group.window or 0) for group in groups[1:])


class PoolSize(NamedTuple):
    """The sizes that the scheduler can rely on."""

    num_pages: int
    max_model_len: int


def cpu_budget(config: Config, device: Device) -> int:
    """Bytes for the pool on a CPU."""
    if config.worker.cpu_kv_cache_gib:
        return int(config.worker.cpu_kv_cache_gib * _GIB)
    return min(int(device.free_memory() * _CPU_SHARE), _CPU_MOST)


def plan_pool(
    config: Config,
    model: ModelConfig,
    groups: Sequence[PageGroup],
    kv: KVType,
    budget: int,
    *,
    beside_page_bytes: int = 0,
) -> PoolSize:
    """Choose the number of pages, and the longest sequence.

    Args:
        config: `num_pages` overrides the budget; an explicit `max_model_len` must fit.
        model: limits the length by its positions.
        groups: what a page holds.
        kv: what keys and values are stored as.
        budget: bytes.
        beside_page_bytes: bytes that something else keeps for each page, out of the same budget.

    Raises:
        ConfigError: if no page fits, or the requested length does not. It is a NoMemoryError if more memory would help.
    """
    page_size, wanted = config.scheduler.page_size, config.model.max_model_len
    if wanted > model.max_model_len:
        raise ConfigError(f"--max-model-len {wanted} exceeds the model's {model.max_model_len} positions")
    one = page_bytes(groups, kv) + beside_page_bytes
    num_pages = config.worker.num_pages or budget // one
    if not model.kv and not config.worker.num_pages:
        num_pages = min(num_pages, num_empty_pages(config, wanted or model.max_model_len))
    raisers = "--num-pages, --cpu-kv-cache-gib or --gpu-memory-utilization"
    if num_pages < 1:
        raise NoMemoryError(
            f"no KV page of {one / 2**20:.1f} MiB fits the {max(0, budget) / _GIB:.2f} GiB left for pages; "
            f"raise {raisers}"
        )
    longest = longest_sequence(num_pages, page_size, window_groups(groups), wanted or model.max_model_len)
    if longest < max(wanted, 1):
        error = ConfigError if config.worker.num_pages else NoMemoryError
        raise error(
            f"--max-model-len {wanted or 1} does not fit: the {num_pages} pages of the KV pool hold sequences of "
            f"{longest} tokens; lower it, or raise {raisers}"
        )
    return PoolSize(num_pages, longest)
