"""The second part of a start: how many pages fit beside the weights, and what they hold."""

import time
from typing import NamedTuple

import structlog

from penstock.config import Config
from penstock.config.parts import brought
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.devices.out_of_memory import no_memory_for
from penstock.gpu_worker.part import WorkerPart
from penstock.gpu_worker.startup.loaded import Loaded
from penstock.gpu_worker.startup.memory_profile import Budget, pool_budget
from penstock.gpu_worker.state.host_pages import HostPages, NoHostMemoryError
from penstock.gpu_worker.state.kv_pool import KVPool, PageGroup, PoolSize, kv_name, page_bytes, page_groups, plan_pool
from penstock.gpu_worker.state.state_slots import state_slots
from penstock.gpu_worker.state.transfers import slots_bytes
from penstock.models.state_limits import num_snapshots

log = structlog.get_logger()

_GIB = 1 << 30
_MAX_STAGING = 1 << 30


class PoolPlan(NamedTuple):
    """What the pool will be."""

    groups: tuple[PageGroup, ...]
    size: PoolSize
    num_snapshots: int  # copies of rows' states
    activations: int  # bytes of the largest step; 0: not measured


def choose_pool(config: Config, loaded: Loaded) -> PoolPlan:
    """Choose the number of pages from the memory that the largest batch leaves.

    Raises:
        ConfigError: if no page fits, or the requested length does not.
    """
    scheduler, worker, ahead, device = config.scheduler, config.worker, loaded.ahead, loaded.device
    largest = f"a batch of {scheduler.max_num_batched_tokens} tokens and {scheduler.max_num_seqs} rows"
    with no_memory_for(f"{largest} beside the weights", "lower --max-num-batched-tokens or --max-num-seqs"):
        parts = config, loaded.model, loaded.dtype, loaded.kv_type, device, ahead
        budget, activations = Budget(0) if worker.num_pages else pool_budget(*parts)
    budget -= ahead.row_bytes * (scheduler.max_num_seqs + 1)
    groups = page_groups(loaded.model.config, scheduler.page_size)
    takes_snapshots = loaded.part.state_bytes > 0 and len(groups) == 1 and scheduler.enable_prefix_caching
    if device.torch_device.type == "cuda":
        budget -= sum(kind.device_bytes(config, loaded.model) for kind in brought("worker", WorkerPart))
        budget -= int(worker.state_snapshots_gib * _GIB) if takes_snapshots else 0
    if (_host_bytes(config) or _needs_host_pages(config)) and device.lanes() is not None:
        budget -= slots_bytes(page_bytes(groups, loaded.kv_type))
    size = plan_pool(config, loaded.part, groups, loaded.kv_type, budget, beside_page_bytes=ahead.page_bytes)
    snapshots = num_snapshots(config, loaded.part.state_bytes, size.num_pages) if takes_snapshots else 0
    return PoolPlan(groups, size, snapshots, activations)


def make_pool(config: Config, loaded: Loaded, plan: PoolPlan, *, has_dummy_page: bool) -> KVPool:
    """Allocate the pool; `has_dummy_page`: for the padding rows of graphs."""
    device = loaded.device.torch_device
    return KVPool(
        plan.groups,
        plan.size.num_pages,
        loaded.kv_type,
        device,
        has_dummy_page=has_dummy_page,
        is_shared=any(kind.needs_shared_pages(config) for kind in brought("worker", WorkerPart)),
        states=state_slots(loaded.part, config.scheduler.max_num_seqs + 1, device, plan.num_snapshots),
    )


def make_host_pages(config: Config, kv: KVPool, device: Device, max_model_len: int) -> HostPages | None:
    """The host tier, if one is wanted, or else host pages for the parts that need some.

    If there is no memory for them, serving goes on without.
    """
    num_bytes = _host_bytes(config)
    if not num_bytes and _needs_host_pages(config):
        num_bytes = _staging_bytes(config, kv.page_bytes, max_model_len)
    if not num_bytes:
        return None
    began = time.monotonic()
    try:
        host_pages = HostPages.within(num_bytes, kv, device)
    except NoHostMemoryError as error:
        log.error("host tier not available", reason=str(error))
        return None
    log.info(
        "host tier",
        pages=host_pages.num_pages,
        tokens=host_pages.num_pages * kv.page_size,
        mib=round(host_pages.num_pages * host_pages.page_bytes / 2**20),
        seconds=round(time.monotonic() - began, 2),
    )
    return host_pages


def _host_bytes(config: Config) -> int:
    return sum(kind.host_bytes(config) for kind in brought("worker", WorkerPart))


def _needs_host_pages(config: Config) -> bool:
    return any(kind.needs_host_pages(config) for kind in brought("worker", WorkerPart))


def _staging_bytes(config: Config, page_bytes: int, max_model_len: int) -> int:
    """The host memory through which pages pass if there is no host tier: room for one long sequence."""
    num_pages = max(64, -(-max_model_len // config.scheduler.page_size))
    return max(page_bytes, min(num_pages * page_bytes, _MAX_STAGING))


def log_pool(config: Config, loaded: Loaded, plan: PoolPlan) -> None:
    """Log what was loaded, and what the pool holds."""
    page_size, size, kv_type = config.scheduler.page_size, plan.size, loaded.kv_type
    whole_page = page_bytes(plan.groups, kv_type)
    log.info(
        "model loaded",
        load_seconds=round(loaded.seconds, 2),
        read_mib=round(loaded.bytes_read / 2**20, 1),
        device=loaded.device.name,
        dtype=kv_name(loaded.dtype),
        kernels=loaded.model.kernels,
        kv_type=kv_name(kv_type),
        kv_pool_tokens=size.num_pages * page_size,
        kv_pool_mib=round(size.num_pages * whole_page / 2**20),
        max_model_len=size.max_model_len,
    )
    for number, group in enumerate(plan.groups):
        log.info(
            "page group",
            number=number,
            layers=len(group.layers),
            window=group.window,
            page_size=group.page_size,
            bytes_per_token=group.bytes_per_token(kv_type),
            empty_percent=round(100 * (1 - group.page_size * group.bytes_per_token(kv_type) / whole_page)),
        )
