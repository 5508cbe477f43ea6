"""A step's tensors on the device, from its batch and the row state."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.model import ForwardInputs, GroupInputs
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.host_step import HostBatch
from penstock.kernels.prepare_inputs import prepare_inputs


class SamplingRows(NamedTuple):
    """The rows that sample in a step."""

    logits_indices: Tensor  # int32[S], into the step's tokens
    rows: Tensor  # int64[S]
    positions: Tensor  # int64[S], where the sampled tokens go


def make_inputs(
    batch: HostBatch, state: RowState, device: Device, page_size: int
) -> tuple[ForwardInputs, SamplingRows]:
    """Make the device tensors of a step. One upload carries the batch; the rest is gathered on the device."""
    n, s = batch.rows.shape[0], batch.sample_idx.shape[0]
    start = batch.start_places
    packed = device.upload(np.concatenate((batch.rows, start, batch.num_new, batch.sample_idx.astype(np.int32))))
    max_seq_len = int((start + batch.num_new).max())
    inputs, last = gather_inputs(
        packed[: 3 * n].view(3, n),
        state,
        page_size,
        num_tokens=int(batch.num_new.sum()),
        # On a GPU the table keeps its width, because each kind of row stride needs a compiled kernel of its own.
        num_pages=None if device.compiles_launches else -(-max_seq_len // page_size),
        max_query_len=int(batch.num_new.max()),
        max_seq_len=max_seq_len,
    )
    inputs = inputs._replace(host_lens=(batch.num_new, batch.start + batch.num_new))
    if batch.paths is not None:
        inputs, last = _in_trees(inputs, last, batch, device)
    if s == n:
        return inputs, last
    return inputs, SamplingRows(*(tensor.index_select(0, packed[3 * n :]) for tensor in last))


def _in_trees(
    inputs: ForwardInputs, last: SamplingRows, batch: HostBatch, device: Device
) -> tuple[ForwardInputs, SamplingRows]:
    """Inputs gathered at the places of tree nodes, changed to have the nodes' positions."""
    assert batch.paths is not None
    ahead = device.upload(batch.start - batch.start_places)
    by_token = ahead.repeat_interleave(inputs.query_start_loc.diff(), output_size=inputs.input_ids.shape[0])
    inputs = inputs._replace(
        positions=inputs.positions + by_token, seq_lens=inputs.seq_lens + ahead, paths=device.upload(batch.paths)
    )
    return inputs, last._replace(positions=last.positions + ahead)


def gather_inputs(
    batch: Tensor,
    state: RowState,
    page_size: int,
    *,
    num_tokens: int,
    num_pages: int | None,
    max_query_len: int,
    max_seq_len: int,
) -> tuple[ForwardInputs, SamplingRows]:
    """Gather a step's inputs from the row state, with launches only, so that it can run inside captured graphs.

    Args:
        batch: int32[3, N]: rows, first positions, number of positions.
        state: the state of the rows.
        page_size: tokens per page.
        num_tokens: T, the sum of the numbers of positions.
        num_pages: columns of the page table that are needed; None for all.
        max_query_len: as in `ForwardInputs`.
        max_seq_len: as in `ForwardInputs`; an upper bound is fine.

    Returns:
        The inputs, and the sampling rows of a step in which every row samples.
    """
    rows, start, num_new = batch
    step = prepare_inputs(rows, start, num_new, num_tokens, state.token_ids, state.page_table, page_size)
    inputs = ForwardInputs(
        input_ids=step.input_ids,
        positions=step.positions,
        rows=rows,
        slot_mapping=step.slot_mapping,
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        page_table=state.page_table[:, :num_pages].index_select(0, rows),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    if state.window_tables:
        others = []
        for table, size in state.window_tables:
            slots = prepare_inputs(rows, start, num_new, num_tokens, state.token_ids, table, size).slot_mapping
            width = None if num_pages is None else -(-max_seq_len // size)
            others.append(GroupInputs(slots, table[:, :width].index_select(0, rows)))
        inputs = inputs._replace(others=tuple(others))
    return inputs, SamplingRows(step.logits_indices, rows.long(), step.seq_lens.long())
