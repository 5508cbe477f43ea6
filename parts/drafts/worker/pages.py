"""Pages of a drafter: one for each page of the model's first group, with the same number, so page tables are shared.

When the model's prefix cache reuses a page, the drafter finds its own data in the page with the same number. For pages
that come back from the host's memory or from another engine, the drafter's page has stale data. Then its guesses are
worse, but nothing else changes.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.state.host_pages import independent_runs
from penstock.gpu_worker.state.kv_pool import KVPool, KVType, PageGroup, page_bytes
from penstock.ipc.messages import ON_DEVICE, StepPlan
from penstock.parts.drafts.worker.drafter import Int32Array


class DraftPages:
    """The drafter's pool of pages."""

    def __init__(
        self, group: PageGroup, num_pages: int, kv: KVType, device: Device, *, has_dummy_page: bool = False
    ) -> None:
        self.kv = KVPool((group,), num_pages, kv, device.torch_device, has_dummy_page=has_dummy_page)
        self._device = device

    def apply(self, plan: StepPlan) -> tuple[Int32Array, Int32Array]:
        """Copy pages as the plan copies the model's; return sources and targets, int32[C] each."""
        src, dst = (np.frombuffer(buffer, dtype=np.int32) for buffer in (plan.copy_src, plan.copy_dst))
        if plan.copy_tiers:
            stays = np.frombuffer(plan.copy_tiers, dtype=np.uint8) == ON_DEVICE
            src, dst = src[stays], dst[stays]
        upload = self._device.upload
        for begin, end in independent_runs(src.tolist(), dst.tolist(), [ON_DEVICE] * src.shape[0]):
            self.kv.copy_pages(upload(src[begin:end]), upload(dst[begin:end]))
        return src, dst


def uncounted(device: Device) -> AbstractContextManager[None]:
    """In here a drafter's layers are not counted: other engines read the model's pages by the count of its layers."""
    return nullcontext() if device.library is None else device.library.uncounted()


def draft_page_bytes(group: PageGroup, kv: KVType) -> int:
    """Bytes of one page of a drafter."""
    return page_bytes((group,), kv)
