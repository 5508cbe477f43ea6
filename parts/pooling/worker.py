"""Rows that return a vector instead of a token: it is pooled from the final hidden states of their positions."""

from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.gpu_worker.part import Context
from penstock.gpu_worker.steps.host_step import HostBatch
from penstock.gpu_worker.steps.row_part import RowPart, Sent
from penstock.ipc.messages import Pooling, StepPlan, StepResult

_SMALLEST = 1e-12
"""The least length that a vector is divided by, as in torch's `normalize`."""


class Pooler(RowPart):
    """The rows that pool, and the sums over their positions so far.

    Sums are float64: their order depends on how a prompt was cut into chunks, and in float64 that makes no difference
    that fp32 can show. A row whose mean is asked for begins at position 0, so its sum covers all positions.
    """

    draws = False

    def __init__(self) -> None:
        self.rows: dict[int, Pooling] = {}
        self._sums: dict[int, Tensor] = {}  # fp64[H], by row
        self._vectors: list[Tensor] = []  # fp32, of the current step

    @classmethod
    def of(cls, context: Context) -> "Pooler":
        return cls()

    def enter(self, plan: StepPlan) -> None:
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
        self._vectors.clear()

    def _forget(self, row: int) -> None:
        self.rows.pop(row, None)
        self._sums.pop(row, None)

    def computed(self, batch: HostBatch, hidden: Tensor) -> None:
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

    def sends(self) -> Sent | None:
        """The step's vectors, and their sizes."""
        vectors, self._vectors = self._vectors, []
        if not vectors:
            return None
        sizes = np.array([vector.shape[0] for vector in vectors], dtype=np.int32)
        return Sent(
            partial(_with_vectors, sizes.tobytes()), torch.cat([vector.view(torch.int32) for vector in vectors])
        )


def _with_vectors(sizes: bytes, result: StepResult, vectors: bytes) -> StepResult:
    return replace(result, pooled=vectors, pooled_sizes=sizes)


def _finished(vector: Tensor, pooling: Pooling) -> Tensor:
    """fp64[H] -> fp32[size]"""
    if pooling.size:
        vector = vector[: pooling.size]
    if pooling.is_normalized:
        vector = vector / vector.norm().clamp_min(_SMALLEST)
    return vector.float().contiguous()


PARTS = (Pooler,)
