"""The disk tier of a worker that is about to say hello."""

from collections.abc import Sequence

import structlog
from msgspec.structs import replace

from penstock.config import Config
from penstock.gpu_worker.part import Context, WorkerPart
from penstock.gpu_worker.state.kv_pool import PageGroup
from penstock.ipc.messages import WorkerHello
from penstock.parts.disk.options import DiskOptions
from penstock.parts.disk.worker.identity import Identity
from penstock.parts.disk.worker.mover import DiskMover
from penstock.parts.disk.worker.store import open_store

log = structlog.get_logger()

_GIB = 1 << 30
_PATIENCE = 2.0
"""How long to wait for a worker that has just died to release the folder, in seconds."""


class DiskTier(DiskMover):
    """The disk tier, as a part of the worker."""

    @classmethod
    def needs_host_pages(cls, config: Config) -> bool:
        return config.of(DiskOptions).tier is not None

    @classmethod
    def of(cls, context: Context) -> "DiskTier | NoDiskTier | None":
        """Open the folder for pages of this worker; if it cannot be used, the log says why."""
        config, hello, host = context.config, context.hello, context.host_pages
        tier = config.of(DiskOptions).tier
        if tier is None:
            return None
        folder, gib = tier
        if host is None:
            return NoDiskTier()
        if hello.num_ranks > 1:
            log.warning("disk KV: off, as several workers hold the model together")
            return NoDiskTier()
        identity = _identity(hello, context.kv.groups)
        store = open_store(folder, identity, int(gib * _GIB), _PATIENCE)
        return NoDiskTier() if store is None else cls(store, host)

    def hello(self, hello: WorkerHello) -> WorkerHello:
        return replace(hello, num_disk_places=self.num_places)


class NoDiskTier(WorkerPart):
    """A disk tier that is wanted, but could not be opened."""

    def hello(self, hello: WorkerHello) -> WorkerHello:
        return replace(hello, failed_tiers=(*hello.failed_tiers, "disk"))


def _identity(hello: WorkerHello, groups: Sequence[PageGroup]) -> Identity:
    return Identity(
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
