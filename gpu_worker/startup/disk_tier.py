"""The disk tier of a worker that is about to say hello."""

from collections.abc import Sequence

import structlog

from penstock.config import Config
from penstock.gpu_worker.disk.identity import Identity
from penstock.gpu_worker.disk.mover import DiskMover, HostPages
from penstock.gpu_worker.disk.store import open_store
from penstock.gpu_worker.state.kv_pool import PageGroup
from penstock.ipc.messages import WorkerHello

log = structlog.get_logger()

_GIB = 1 << 30
_MAX_STAGING = 1 << 30
_PATIENCE = 2.0
"""How long to wait for a worker that has just died to release the folder, in seconds."""


def staging_bytes(config: Config, page_bytes: int, max_model_len: int) -> int:
    """Return the host memory that stages pages for the disk if there is no host tier: room for one long sequence."""
    if not config.worker.disk_kv or config.worker.host_kv_gib:
        return 0
    num_pages = max(64, -(-max_model_len // config.scheduler.page_size))
    return max(page_bytes, min(num_pages * page_bytes, _MAX_STAGING))


def open_disk(config: Config, hello: WorkerHello, groups: Sequence[PageGroup], host: HostPages) -> DiskMover | None:
    """Open the folder for pages of this worker; None if it cannot be used, which the log explains."""
    if hello.num_ranks > 1:
        log.warning("disk KV: off, as several workers hold the model together")
        return None
    identity = Identity(
        model=hello.model_fingerprint,
        weights=hello.weights,
        dtype=hello.dtype,
        kernels=hello.kernels,
        layout="; ".join(
            f"layers {','.join(map(str, group.layers))}: {group.page_size} tokens, {group.num_kv_heads} heads of "
            f"{group.head_dim}, window {group.window}, {'keys and values' if group.has_values else 'keys'}"
            for group in groups
        ),
        page_bytes=hello.page_bytes,
        arithmetic=hello.arithmetic,
    )
    assert config.worker.disk_tier is not None
    folder, gib = config.worker.disk_tier
    store = open_store(folder, identity, int(gib * _GIB), _PATIENCE)
    return None if store is None else DiskMover(store, host)
