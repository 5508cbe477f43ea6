"""One step: apply the plan to the row state, run the model, sample, start copying the tokens to the host."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.core.checkpoint.source import Checkpoint
from penstock.gpu_worker.devices.device import Device, Graphs, Mark
from penstock.gpu_worker.grammars.masks import Grammars
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.cuda_graphs import DecodeGraphs
from penstock.gpu_worker.steps.drafts import Drafts
from penstock.gpu_worker.steps.host_step import HostBatch, PendingStep, StepOutput, TokenScores, host_batch, pack
from penstock.gpu_worker.steps.input_batch import SamplingRows, make_inputs
from penstock.gpu_worker.steps.logprobs import prompt_scores, score
from penstock.ipc.messages import RowError, StepPlan
from penstock.kernels.sampling import sample


class ModelRunner:
    """Model, KV pool and row state on one device."""

    def __init__(
        self, model: Model, kv: KVPool, device: Device, max_num_seqs: int, max_model_len: int, checkpoint: Checkpoint
    ) -> None:
        """`checkpoint` has the tokenizer, which grammars need. CUDA graphs need a pool with a dummy page."""
        config = model.config
        self._model = model
        self._kv = kv
        self._device = device
        self._page_size = kv.page_size
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        num_rows = max_num_seqs + 1  # the last one is the dummy row
        others = [group.page_size for group in kv.groups[1:]]
        self._state = RowState(num_rows, max_model_len, self._page_size, device, others)
        model.prepare(device, num_rows, max_model_len)
        windows = [table for table, _ in self._state.window_tables]
        self._whole_step = model.whole_step(self._state.token_ids, [self._state.page_table, *windows], kv)
        self._grammars = Grammars(checkpoint, config.vocab_size, device)
        self.grammar_store = self._grammars.store
        self._drafts = Drafts(self._state, num_rows, self._grammars.has)
        self._graphs: DecodeGraphs | None = None
        self._ended: Mark | None = None  # end of the last launched step

    def memory_use(self) -> tuple[int, int]:
        """Used and total bytes of the device."""
        return self._device.memory_use()

    def capture_graphs(self, graphs: Graphs) -> None:
        """Capture decode steps as CUDA graphs."""
        self._state.use_dummy_page(self._max_num_seqs, self._kv.dummy_page)
        self._graphs = DecodeGraphs(
            self._model,
            self._kv,
            self._state,
            graphs,
            self._device,
            dummy_row=self._max_num_seqs,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
        )
        self._graphs.capture()

    def clear_rows(self) -> None:
        """Forget all sequences."""
        self._state.clear()
        self._grammars.clear()
        self._drafts.clear()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Do the host's part of a plan; on a GPU this returns before the device is done."""
        began, ended_before = self._device.mark(), self._ended
        self._state.apply(plan)
        if self._grammars.rows or any(new.grammar_id for new in plan.new_rows):
            self._grammars.apply(plan)
        for new in plan.new_rows:
            self._model.enter_row(new.row, new.num_prompt_tokens)
        if plan.copy_src:
            src, dst = (np.frombuffer(buffer, dtype=np.int32) for buffer in (plan.copy_src, plan.copy_dst))
            self._kv.copy_pages(self._device.upload(src), self._device.upload(dst))
        batch, drafted, finish = host_batch(plan), None, None
        if plan.num_drafts or plan.start_bounds:
            batch, drafted = self._drafts.expand(plan, batch)
        output, row_errors = self._compute(batch)
        self._ended = self._device.mark()
        download = None if output is None else self._device.download(output.values)
        if download is not None:
            if self._grammars.rows:
                self._grammars.expect(download)
            if drafted is not None:
                drafted.download = download
                finish = partial(self._drafts.finish, drafted)
        return PendingStep(
            step_id=plan.step_id,
            output=download,
            sizes=() if output is None else output.sizes,
            began=began,
            ended=self._ended,
            ended_before=ended_before,
            row_errors=row_errors,
            finish=finish,
        )

    def _compute(self, batch: HostBatch) -> tuple[StepOutput | None, tuple[RowError, ...]]:
        if batch.rows.shape[0] == 0:
            return None, ()
        prompt, sampling = None, None
        if self._whole_step is not None and self._is_whole(batch, self._whole_step.max_tokens):
            self._begin_masks(batch)
            logits = self._whole_step.compute(batch.rows, batch.start, batch.num_new, batch.sample_idx)
        else:
            hidden, sampling, prompt = self._forward(batch)
            logits = self._model.logits(hidden) if hidden.shape[0] else hidden
        if logits.shape[0] == 0:
            return pack(None, None, prompt), ()
        tokens, drawn, row_errors = self._sample(logits, batch, sampling)
        return pack(tokens, drawn, prompt), row_errors

    def _begin_masks(self, batch: HostBatch) -> None:
        if self._grammars.rows:
            self._grammars.begin(batch.rows[batch.sample_idx])

    def _is_whole(self, batch: HostBatch, max_tokens: int) -> bool:
        """Whether a step can be one call: no row needs hidden states in between, and it is not too long."""
        return not self._state.has_logprobs and int(batch.num_new.sum()) <= max_tokens

    def _forward(self, batch: HostBatch) -> tuple[Tensor, SamplingRows, TokenScores | None]:
        """Hidden states [S, H] of the rows that sample, where their tokens go, and scores of prompt tokens."""
        if self._graphs is not None and self._graphs.covers(batch):
            self._begin_masks(batch)
            return *self._graphs.replay(batch), None
        inputs, sampling = make_inputs(batch, self._state, self._device, self._page_size)
        self._begin_masks(batch)  # not earlier: two Python threads at once are slow
        hidden = self._model.forward(inputs, self._kv)
        prompt = None
        if self._state.has_logprobs:
            prompt = prompt_scores(self._model, hidden, batch, self._state, self._device)
        if sampling.logits_indices.shape[0] != hidden.shape[0]:
            hidden = hidden.index_select(0, sampling.logits_indices)
        return hidden, sampling, prompt

    def _sample(
        self, logits: Tensor, batch: HostBatch, sampling: SamplingRows | None
    ) -> tuple[Tensor, TokenScores | None, tuple[RowError, ...]]:
        """Sample from [S, V] logits, and score the sampled tokens where a row asks for it.

        The next step reads the tokens from the row state, whether or not the host has seen them. Only logits computed
        by the native CPU kernels come without `sampling`, which these do not need.
        """
        state = self._state
        rows = batch.rows[batch.sample_idx]
        positions = (batch.start + batch.num_new)[batch.sample_idx]
        asking = (state.num_logprobs[rows] >= 0).nonzero()[0] if state.has_logprobs else rows[:0]
        index, raw = None, None
        if asking.shape[0]:
            index = self._device.upload(asking)
            raw = logits.index_select(0, index)  # a copy, because sampling changes the logits
        row_errors = self._grammars.mask(logits) if self._grammars.rows else ()
        state.limit_tokens(logits, rows, positions)
        if state.native_sampler is not None and state.native_sampler.takes(logits):
            tokens = state.native_sampler.draw(logits, rows, positions)
        else:
            assert sampling is not None
            needs = state.needs(rows, positions)
            tokens = sample(logits, sampling.rows, sampling.positions, state.sampling, needs)
        if index is None or raw is None:
            return tokens, None, row_errors
        drawn = tokens.index_select(0, index).clamp_(min=0)  # a row without a token is scored too
        return tokens, score(raw, drawn, int(state.num_logprobs[rows].max())), row_errors
