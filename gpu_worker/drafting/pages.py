"""Pages of a drafter: one for each page of the model's first group, with the same number, so tables are shared.

What is in a page that the model's prefix cache knows is found there again. Pages that come back from the host's memory,
or from another engine, hold what was there before: guesses are worse then, and nothing else.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.drafting.drafter import Int32Array
from penstock.gpu_worker.state.host_pages import independent_runs
from penstock.gpu_worker.state.kv_pool import KVPool, KVType, PageGroup, page_bytes
from penstock.ipc.messages import ON_DEVICE, StepPlan


class DraftPages:
    """The pool."""

    def __init__(
        self, group: PageGroup, num_pages: int, kv: KVType, device: Device, *, has_dummy_page: bool = False
    ) -> None:
        self.kv = KVPool((group,), num_pages, kv, device.torch_device, has_dummy_page=has_dummy_page)
        self._device = device

    def apply(self, plan: StepPlan) -> tuple[Int32Array, Int32Array]:
        """Copy pages as the plan copies the model's; return from where and to where, int32[C] each."""
        src, dst = (np.frombuffer(buffer, dtype=np.int32) for buffer in (plan.copy_src, plan.copy_dst))
        if plan.copy_tiers:
            stays = np.frombuffer(plan.copy_tiers, dtype=np.uint8) == ON_DEVICE
            src, dst = src[stays], dst[stays]
        upload = self._device.upload
        for begin, end in independent_runs(src.tolist(), dst.tolist(), [ON_DEVICE] * src.shape[0]):
            self.kv.copy_pages(upload(src[begin:end]), upload(dst[begin:end]))
        return src, dst


def uncounted(device: Device) -> AbstractContextManager[None]:
    """What a drafter computes in here does not count as layers of the model, by which other engines read its pages."""
    return nullcontext() if device.library is None else device.library.uncounted()


def draft_page_bytes(group: PageGroup, kv: KVType) -> int:
    """Bytes of a page."""
    return page_bytes((group,), kv)
