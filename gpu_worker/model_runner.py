"""One step: apply the plan to the row state, run the model, sample, start the tokens' way to the host."""

import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_worker.device import Device, Download
from penstock.gpu_worker.input_batch import host_batch, make_inputs
from penstock.gpu_worker.models.dense import DenseModel
from penstock.gpu_worker.rope import Rope
from penstock.gpu_worker.row_state import RowState
from penstock.ipc.messages import StepPlan, StepResult
from penstock.kernels.copy_pages import copy_pages
from penstock.kernels.sampling import sample


class PendingStep(NamedTuple):
    """A launched step whose tokens are on their way."""

    step_id: int
    tokens: Download | None  # None if no row samples
    launched_at: float
    num_idle_us: int

    def is_ready(self) -> bool:
        """Whether `result` would return at once."""
        return self.tokens is None or self.tokens.is_ready()

    def result(self) -> StepResult:
        """The step's answer; blocks until the device has it."""
        token_ids = b"" if self.tokens is None else self.tokens.wait()
        forward_us = int((time.monotonic() - self.launched_at) * 1e6)
        return StepResult(self.step_id, token_ids, forward_us, self.num_idle_us)


class ModelRunner:
    """Model, KV pool and row state on one device."""

    def __init__(self, model: DenseModel, kv: Tensor, device: Device, max_num_seqs: int, max_model_len: int) -> None:
        config = model.config
        self._model = model
        self._kv = kv
        self._device = device
        self._page_size = kv.shape[4]
        self._state = RowState(max_num_seqs, max_model_len, self._page_size, device)
        self._rope = Rope(config.rope, config.head_dim, max_model_len, max_num_seqs, device.torch_device)
        self._ended_at = 0.0  # when the last step that left nothing queued was done

    def clear_rows(self) -> None:
        """Forget all sequences."""
        self._state.clear()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Run a plan as far as the host must; on a GPU this returns before the device is done."""
        launched_at = time.monotonic()
        idle_us = int((launched_at - self._ended_at) * 1e6) if self._ended_at else 0
        self._state.apply(plan)
        for new in plan.new_rows:
            self._rope.set_row(new.row, new.num_prompt_tokens)
        if plan.copy_src:
            src, dst = (np.frombuffer(buffer, dtype=np.int32) for buffer in (plan.copy_src, plan.copy_dst))
            copy_pages(self._kv, self._device.upload(src), self._device.upload(dst))
        tokens = self._compute(plan)
        download = None if tokens is None else self._device.download(tokens)
        self._ended_at = time.monotonic()
        return PendingStep(plan.step_id, download, launched_at, idle_us)

    def _compute(self, plan: StepPlan) -> Tensor | None:
        batch = host_batch(plan)
        if batch.rows.shape[0] == 0:
            return None
        num_kv_heads = self._model.config.num_kv_heads
        inputs, sampling = make_inputs(batch, self._state, self._rope, self._device, self._page_size, num_kv_heads)
        hidden = self._model.forward(inputs, self._kv)
        if batch.sample_idx.shape[0] == 0:
            return None
        if sampling.logits_indices.shape[0] != hidden.shape[0]:
            hidden = hidden.index_select(0, sampling.logits_indices)
        seq_lens = batch.start + batch.num_new
        needs = self._state.needs(batch.rows[batch.sample_idx], seq_lens[batch.sample_idx])
        tokens = sample(self._model.logits(hidden), sampling.rows, sampling.positions, self._state.sampling, needs)
        # The next step reads them from here, whether or not the host has seen them.
        self._state.token_ids[sampling.rows, sampling.positions] = tokens
        return tokens
