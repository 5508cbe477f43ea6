"""One step's batch, from the plan's host arrays and the row state."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models import Model
from penstock.gpu_worker.models.dense import ForwardInputs
from penstock.gpu_worker.models.rope import Rope
from penstock.gpu_worker.state.row_state import RowState
from penstock.ipc.messages import StepPlan
from penstock.kernels.paged_attention_cpu import plan_cpu_attention
from penstock.kernels.prepare_inputs import prepare_inputs
from penstock.kernels.qk_norm_rope_write import slot_cells

Int32Array = npt.NDArray[np.int32]


class HostBatch(NamedTuple):
    """What a plan says of its batch (N rows, S of them sample)."""

    rows: Int32Array  # [N]
    start: Int32Array  # [N]
    num_new: Int32Array  # [N]
    sample_idx: npt.NDArray[np.int64]  # [S], indices into the batch


class SamplingRows(NamedTuple):
    """The rows that sample in a step."""

    logits_indices: Tensor  # int32[S], into the step's tokens
    rows: Tensor  # int64[S]
    positions: Tensor  # int64[S], where the drawn tokens go


def host_batch(plan: StepPlan) -> HostBatch:
    """View the plan's buffers as arrays."""
    return HostBatch(
        np.frombuffer(plan.rows, dtype=np.int32),
        np.frombuffer(plan.start, dtype=np.int32),
        np.frombuffer(plan.num_new, dtype=np.int32),
        np.frombuffer(plan.samples, dtype=np.uint8).nonzero()[0],
    )


def make_inputs(
    batch: HostBatch, state: RowState, rope: Rope, device: Device, page_size: int, model: Model
) -> tuple[ForwardInputs, SamplingRows]:
    """The device tensors of a step; one upload brings the batch, the rest is gathered there."""
    n, s = batch.rows.shape[0], batch.sample_idx.shape[0]
    packed = device.upload(np.concatenate((batch.rows, batch.start, batch.num_new, batch.sample_idx.astype(np.int32))))
    needs_cpu_plan = not packed.is_cuda and model.needs_cpu_plan(int(batch.num_new.sum()))
    num_kv_heads = model.config.num_kv_heads if needs_cpu_plan else None
    inputs, logits_indices = _forward_inputs(batch, packed[: 3 * n], state, rope, page_size, num_kv_heads)
    rows, sample_idx = packed[:n], packed[3 * n :]
    if s == n:
        return inputs, SamplingRows(logits_indices, rows.long(), inputs.seq_lens.long())
    sampling = SamplingRows(
        logits_indices.index_select(0, sample_idx),
        rows.index_select(0, sample_idx).long(),
        inputs.seq_lens.index_select(0, sample_idx).long(),
    )
    return inputs, sampling


def _forward_inputs(
    batch: HostBatch, packed: Tensor, state: RowState, rope: Rope, page_size: int, num_kv_heads: int | None
) -> tuple[ForwardInputs, Tensor]:
    """The inputs, and int32[N]: the index of each row's last token; `num_kv_heads` where torch's CPU kernels want their
    plan."""
    rows, start, num_new = packed.chunk(3)
    num_tokens = int(batch.num_new.sum())
    step = prepare_inputs(rows, start, num_new, num_tokens, state.token_ids, state.page_table, page_size)
    seq_lens = batch.start + batch.num_new
    max_seq_len = int(seq_lens.max())
    table = state.page_table
    if not packed.is_cuda:  # on a GPU its width stays the same: a kernel is compiled for each kind of row stride
        table = table[:, : -(-max_seq_len // page_size)]
    page_table = table.index_select(0, rows)
    cpu_plan, cpu_cells = None, None
    if num_kv_heads is not None:
        starts = [0, *batch.num_new.cumsum().tolist()]
        cpu_plan = plan_cpu_attention(starts, seq_lens.tolist(), page_table, page_size, num_kv_heads)
        cpu_cells = slot_cells(step.slot_mapping, num_kv_heads, page_size)
    rope_positions, cos_sin = rope.for_step(step.positions, rows, num_new)
    inputs = ForwardInputs(
        input_ids=step.input_ids,
        rope_positions=rope_positions,
        cos_sin=cos_sin,
        slot_mapping=step.slot_mapping,
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        page_table=page_table,
        max_query_len=int(batch.num_new.max()),
        max_seq_len=max_seq_len,
        cpu_plan=cpu_plan,
        cpu_cells=cpu_cells,
    )
    return inputs, step.logits_indices
