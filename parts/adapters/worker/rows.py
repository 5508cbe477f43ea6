"""The adapters in this worker's memory, and the rows that have one."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import structlog
import torch

from penstock.config import Config
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.adapters import Adapters
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.part import Context
from penstock.gpu_worker.steps.host_step import HostBatch
from penstock.gpu_worker.steps.made_up_plans import Limits, MadeUpRow, made_up_plan
from penstock.gpu_worker.steps.row_part import RowPart
from penstock.ipc import faults
from penstock.ipc.messages import StepPlan
from penstock.parts.adapters.keys import weights_bytes
from penstock.parts.adapters.messages import AdapterPrepared, DropAdapter, ForgetAdapter, PrepareAdapter
from penstock.parts.adapters.options import AdapterOptions
from penstock.parts.adapters.worker.files import AdapterError, Fitting
from penstock.parts.adapters.worker.store import AdapterStore, Kept

log = structlog.get_logger()


class AdapterRows(RowPart):
    """All methods run in the worker's main thread; files are read, and matrices arranged, in another one."""

    orders = (PrepareAdapter, DropAdapter, ForgetAdapter)
    can_be_captured = False

    def __init__(
        self, adapters: Adapters, store: AdapterStore, device: Device, num_slots: int, *, has_graphs: bool
    ) -> None:
        """
        Args:
            adapters: with room for so many.
            store: reads them.
            device: where they go.
            num_slots: how many.
            has_graphs: whether steps with adapters are captured, if there are graphs and the device allows it.
        """
        self._has_graphs = has_graphs and adapters.can_be_captured
        self.rows: dict[int, int] = {}
        """Row -> adapter id."""
        self._adapters = adapters
        self.modules = adapters.modules
        """What an adapter can change."""
        self._store = store
        self._device = device
        self._free = list(reversed(range(num_slots)))
        self._slots: dict[int, int] = {}  # by adapter id, of those that are ready
        self._reading: dict[int, Future[Kept]] = {}
        self._unwanted: set[int] = set()  # those that were dropped while they are read
        self._thread: ThreadPoolExecutor | None = None  # until the first adapter comes
        self._before = faults.point("worker.adapter")

    @classmethod
    def of(cls, context: Context) -> "AdapterRows":
        options, adapters, device = context.config.of(AdapterOptions), context.adapters, context.device
        dtype = _dtype(context.hello.dtype, device)
        num_rows = context.config.scheduler.max_num_seqs + 1
        adapters.prepare(options.max_loras, num_rows, options.max_lora_rank, dtype, device)
        fitting = Fitting.of(adapters.modules, context.model.config, options.max_lora_rank)
        store = AdapterStore(adapters, fitting, dtype, max_num=options.max_cpu_loras)
        return cls(adapters, store, device, options.max_loras, has_graphs=bool(options.lora))

    @classmethod
    def device_bytes(cls, config: Config, model: Model) -> int:
        """Those of `--lora`, as far as they are in memory at a time. Files may have more bytes than are kept."""
        options = config.of(AdapterOptions)
        sizes = sorted((weights_bytes(path) for path in options.adapters.values()), reverse=True)
        return sum(sizes[: options.max_loras])

    def warm_up(self, limits: Limits) -> Iterator[StepPlan]:
        """Steps of each size of blocks, to which empty slots add nothing."""
        if not self._adapters.can_be_captured:
            return
        longest = max(1, limits.max_model_len - 1)
        sizes = {1, *(size * len(self._free) + 1 for size in (16, 64))}
        most = min(limits.max_num_batched_tokens, longest * limits.max_num_seqs)
        with self._adapters.recording():
            for num_tokens in sorted({min(size, most) for size in sizes}):
                rows, rest = divmod(num_tokens, longest)
                each = [MadeUpRow(longest, longest)] * rows + [MadeUpRow(rest, rest)] * (rest > 0)
                yield made_up_plan(limits, each)

    def recording(self) -> AbstractContextManager[None] | None:
        return self._adapters.recording() if self._has_graphs else None

    # --- what is in memory ------------------------------------------------------------------

    def order(self, message: PrepareAdapter | DropAdapter | ForgetAdapter) -> None:
        if isinstance(message, ForgetAdapter):
            self._store.forget(message.key)
            return
        if isinstance(message, DropAdapter):
            if message.adapter_id in self._reading:
                self._unwanted.add(message.adapter_id)
            self._drop(message.adapter_id)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._reading[message.adapter_id] = self._thread.submit(self._read, message)

    def _read(self, message: PrepareAdapter) -> Kept:
        self._before()
        with torch.inference_mode():
            kept = self._store.find(message.key, Path(message.path))
            return kept._replace(made=kept.made.on(self._device.torch_device))

    @property
    def is_busy(self) -> bool:
        return bool(self._reading)

    def take_done(self) -> list[AdapterPrepared]:
        done = [adapter_id for adapter_id, reading in self._reading.items() if reading.done()]
        return [self._put(adapter_id, self._reading.pop(adapter_id)) for adapter_id in done]

    def _put(self, adapter_id: int, reading: "Future[Kept]") -> AdapterPrepared:
        if adapter_id in self._unwanted:
            self._unwanted.remove(adapter_id)
            return AdapterPrepared(adapter_id)
        try:
            kept = reading.result()
        except AdapterError as error:
            return AdapterPrepared(adapter_id, f"the adapter cannot be used: {error}")
        except Exception as error:  # whatever is wrong with somebody's files, it must not end the worker
            log.exception("adapter not read")
            return AdapterPrepared(adapter_id, f"the adapter could not be read: {str(error)[:200]}")
        self._slots[adapter_id] = slot = self._free.pop()
        self._adapters.put(slot, kept.made)
        return AdapterPrepared(adapter_id, rank=kept.rank)

    def _drop(self, adapter_id: int) -> None:
        if (slot := self._slots.pop(adapter_id, None)) is not None:
            self._adapters.clear(slot)
            self._free.append(slot)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # --- rows -------------------------------------------------------------------------------

    def enter(self, plan: StepPlan) -> None:
        given = []
        if self.rows and plan.freed_rows:
            given += [(row, -1) for row in np.frombuffer(plan.freed_rows, dtype=np.int32).tolist() if self._leave(row)]
        for new in plan.new_rows:
            if new.adapter_id:
                self.rows[new.row] = new.adapter_id
                given.append((new.row, self._slots[new.adapter_id]))
            elif self.rows and self._leave(new.row):
                given.append((new.row, -1))
        if given:
            self._adapters.give(given)

    def _leave(self, row: int) -> bool:
        return self.rows.pop(row, None) is not None

    def begins(self, batch: HostBatch) -> None:
        self._adapters.begin(batch.rows, batch.num_new)

    def clear(self) -> None:
        """Forget all rows, and all adapters."""
        self._adapters.give([(row, -1) for row in self.rows])
        self.rows.clear()
        for adapter_id in [*self._slots]:
            self._drop(adapter_id)
        self._reading.clear()  # whoever asked is gone
        self._unwanted.clear()


def _dtype(name: str, device: Device) -> torch.dtype:
    """Of matrices: that of activations on a device of its own; on a CPU the kernels read fp32 and bf16."""
    if name.startswith("bfloat16"):
        return torch.bfloat16
    return torch.float16 if name.startswith("float16") and device.compiles_launches else torch.float32
