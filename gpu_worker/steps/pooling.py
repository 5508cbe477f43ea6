"""Rows that return a vector instead of a token: it is pooled from the final hidden states of their positions."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.steps.host_step import HostBatch, StepOutput
from penstock.ipc.messages import Pooling, StepPlan

_SMALLEST = 1e-12
"""The least length that a vector is divided by, as in torch's `normalize`."""


class Pooler:
    """The rows that pool, and the sums over their positions so far.

    Sums are float64: their order depends on how a prompt was cut into chunks, and in float64 that makes no difference
    that fp32 can show. A row whose mean is asked for begins at position 0, so its sum covers all positions.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.rows: dict[int, Pooling] = {}
        self._sums: dict[int, Tensor] = {}  # fp64[H], by row
        self._vectors: list[Tensor] = []  # fp32, of the current step

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's changes: freed rows, then new rows."""
        for row in np.frombuffer(plan.freed_rows, dtype=np.int32).tolist():
            self._forget(row)
        for new in plan.new_rows:
            self._forget(new.row)
            if new.sampling.pooling is not None:
                self.rows[new.row] = new.sampling.pooling

    def clear(self) -> None:
        """Forget all rows."""
        self.rows.clear()
        self._sums.clear()

    def _forget(self, row: int) -> None:
        self.rows.pop(row, None)
        self._sums.pop(row, None)

    def drawing(self, batch: HostBatch) -> npt.NDArray[np.int64]:
        """int64[D], the sampling rows that draw tokens, as indices into `batch.sample_idx`."""
        rows = batch.rows[batch.sample_idx].tolist()
        return np.array([i for i, row in enumerate(rows) if row not in self.rows], dtype=np.int64)

    def spread(self, logits: Tensor, batch: HostBatch) -> Tensor:
        """Logits of the rows that draw, [D, V] -> [S, V]; the other rows are zeros, and their tokens are not read."""
        drawing = self.drawing(batch)
        if drawing.shape[0] == batch.sample_idx.shape[0]:
            return logits
        index = self._device.upload(drawing)
        return logits.new_zeros(batch.sample_idx.shape[0], logits.shape[1]).index_copy_(0, index, logits)

    def take(self, batch: HostBatch, hidden: Tensor) -> None:
        """Pool a step's final hidden states, [T, H]."""
        samples = {*batch.sample_idx.tolist()}
        ends = batch.num_new.cumsum().tolist()
        for i, (row, end, count) in enumerate(zip(batch.rows.tolist(), ends, batch.num_new.tolist(), strict=True)):
            pooling = self.rows.get(row)
            if pooling is None:
                continue
            vector: Tensor | None = None
            if pooling.kind == "mean":
                vector = hidden[end - count : end].sum(0, dtype=torch.float64)
                if (before := self._sums.get(row)) is not None:
                    vector += before
                self._sums[row] = vector
            if i in samples:
                num_tokens = int(batch.start[i]) + count
                vector = hidden[end - 1].double() if vector is None else vector / num_tokens
                self._vectors.append(_finished(vector, pooling))

    def add_to(self, output: StepOutput) -> tuple[StepOutput, bytes]:
        """Append the step's vectors to what goes to the host; return their sizes, too, int32[P]."""
        vectors, self._vectors = self._vectors, []
        if not vectors:
            return output, b""
        sizes = np.array([vector.shape[0] for vector in vectors], dtype=np.int32)
        values = torch.cat([output.values, *(vector.view(torch.int32) for vector in vectors)])
        return output._replace(values=values), sizes.tobytes()


def _finished(vector: Tensor, pooling: Pooling) -> Tensor:
    """fp64[H] -> fp32[size]"""
    if pooling.size:
        vector = vector[: pooling.size]
    if pooling.is_normalized:
        vector = vector / vector.norm().clamp_min(_SMALLEST)
    return vector.float().contiguous()
