"""One step: apply the plan to the row state, run the model, sample, start copying the tokens to the host."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device, Graphs, Int32Array, IntArray, Mark
from penstock.gpu_worker.models.model import ImageInputs, Model, has_logits
from penstock.gpu_worker.state.host_pages import HostPages
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.ahead import Ahead, Expanded, Place
from penstock.gpu_worker.steps.cuda_graphs import MAX_GRAPH_ROWS, DecodeGraphs
from penstock.gpu_worker.steps.host_step import (
    HostBatch,
    Passed,
    PendingStep,
    Put,
    StepOutput,
    TokenScores,
    host_batch,
    pack,
)
from penstock.gpu_worker.steps.input_batch import SamplingRows, make_inputs
from penstock.gpu_worker.steps.logprobs import prompt_scores, score
from penstock.gpu_worker.steps.mixed_graphs import MixedGraphs, can_mix, mixed_sizes
from penstock.gpu_worker.steps.row_part import RowCalls, RowPart
from penstock.ipc.messages import RowError, StepPlan
from penstock.ipc.overrides import calls, overriding
from penstock.kernels.sampling.sampling import sample
from penstock.models.description.decoder import Decoder


class _Captured(NamedTuple):
    """Graphs, as far as there are some."""

    decodes: DecodeGraphs | None = None
    mixed: MixedGraphs | None = None


class ModelRunner:
    """Model, KV pool and row state on one device."""

    def __init__(self, model: Model, kv: KVPool, device: Device, max_num_seqs: int, max_model_len: int) -> None:
        """CUDA graphs need a pool with a dummy page."""
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
        self._enters_rows = model.enters_rows
        windows = [table for table, _ in self._state.window_tables]
        self._whole_step = model.whole_step(self._state.token_ids, [self._state.page_table, *windows], kv)
        self._draws = has_logits(model.config)
        self._ahead: tuple[Ahead, ...] = ()  # at most one
        self.parts: Sequence[RowPart] = ()
        self._enters: list[Callable[[StepPlan], None]] = []
        self._here: list[RowPart] = []  # the parts that have rows now
        self._calls = RowCalls()  # who of them does something in a step
        self._captured = _Captured()
        self._captured_of: dict[RowPart, _Captured] = {}  # of steps with rows of parts that need graphs of their own
        self._graphs = _Captured()  # those that serve the rows that are here now
        self._ended: Mark | None = None  # end of the last launched step
        self.host_pages: HostPages | None = None  # a tier below the pool
        self.check_drawn: Callable[[Tensor], None] | None = None  # gets the tokens of each step

    def use(self, parts: Sequence[RowPart]) -> None:
        """Let these parts take part in steps. Call this before the first plan."""
        self.parts = parts
        self._enters = calls(RowPart, parts, "enter")
        self._introduce()

    def work_ahead(self, attach: Callable[[Place], Ahead | None]) -> None:
        """Let decodes compute more positions than their own, where plans allow it."""
        ahead = attach(Place(self._model, self._state, self._kv, self._device))
        self._ahead = () if ahead is None else (ahead,)
        self._introduce()

    def _introduce(self) -> None:
        for ahead in self._ahead:
            ahead.judge_by(overriding(RowPart, self.parts, "extend"))
            for part in self.parts:
                part.expect_guesses()

    def memory_use(self) -> tuple[int, int]:
        """Used and total bytes of the device."""
        return self._device.memory_use()

    def capture_graphs(self, graphs: Graphs, dtype: torch.dtype, most_drafts: int = 0) -> None:
        """Capture decode steps as CUDA graphs.

        Args:
            graphs: the device.
            dtype: the activations' dtype.
            most_drafts: most positions that a decode computes beyond its own.
        """
        self._state.use_dummy_page(self._max_num_seqs, self._kv.dummy_page)
        self._captured = self._graphs = _Captured(self._capture_decodes(graphs, dtype, most_drafts))
        for ahead in self._ahead:
            ahead.capture(graphs)

    def capture_mixed_graphs(self, graphs: Graphs, max_num_batched_tokens: int, most_drafts: int = 0) -> int:
        """Capture steps with chunks of prompts, if the model allows it; return how many sizes there are.

        Call this after `capture_graphs`, and after the kernels of steps without graphs have been compiled: from now on
        only long steps go without. Arguments are as in `capture_graphs`.
        """
        mixed = self._capture_mixed(graphs, max_num_batched_tokens, most_drafts)
        self._captured = self._graphs = self._captured._replace(mixed=mixed)
        return 0 if mixed is None else mixed.num_sizes

    def capture_graphs_of_parts(
        self, graphs: Graphs, dtype: torch.dtype, max_num_batched_tokens: int, most_drafts: int = 0
    ) -> None:
        """Capture all steps once more for each part whose rows need that.

        Call this last; arguments are as in `capture_mixed_graphs`.
        """
        for part in self.parts:
            if (recording := part.recording()) is not None:
                with recording:
                    self._captured_of[part] = _Captured(
                        self._capture_decodes(graphs, dtype, most_drafts),
                        self._capture_mixed(graphs, max_num_batched_tokens, most_drafts),
                    )

    def _capture_decodes(self, graphs: Graphs, dtype: torch.dtype, most_drafts: int) -> DecodeGraphs:
        made = DecodeGraphs(
            self._model,
            self._kv,
            self._state,
            graphs,
            self._device,
            dummy_row=self._max_num_seqs,
            most_rows=self._max_num_seqs * (1 + most_drafts),
            max_model_len=self._max_model_len,
            dtype=dtype,
        )
        made.capture()
        return made

    def _capture_mixed(self, graphs: Graphs, max_num_batched_tokens: int, most_drafts: int) -> MixedGraphs | None:
        config = self._model.config
        if not isinstance(config, Decoder) or not can_mix(self._model, self._kv):
            return None
        most_rows = min(self._max_num_seqs * (1 + most_drafts), MAX_GRAPH_ROWS)
        made = MixedGraphs(
            *(self._model, self._kv, self._state, graphs, self._device),
            dummy_row=self._max_num_seqs,
            sizes=mixed_sizes(config, max_num_batched_tokens, most_rows, self._max_model_len),
            max_model_len=self._max_model_len,
        )
        made.capture()
        return made

    def drop_graphs(self) -> None:
        """Launch all steps kernel by kernel from now on. Graphs hold on to the group of ranks that they call."""
        self._captured = self._graphs = _Captured()
        self._captured_of.clear()

    def clear_rows(self) -> None:
        """Forget all sequences."""
        self._state.clear()
        for part in self.parts:
            part.clear()
        self._here, self._calls, self._graphs = [], RowCalls(), self._captured
        for ahead in self._ahead:
            ahead.clear()

    @torch.inference_mode()
    def warm_up_ahead(self, contexts: Sequence[int]) -> None:
        """See `Ahead.warm_up`."""
        for ahead in self._ahead:
            ahead.warm_up(contexts)

    @torch.inference_mode()
    def write_drawn(self, rows: Int32Array, positions: Int32Array, tokens: Int32Array) -> None:
        """Write tokens that another stage has drawn to where the next steps read them; arguments are int32[S] each."""
        self._state.write_tokens(rows, positions, np.ones_like(rows), tokens.tobytes())

    @torch.inference_mode()
    def launch(self, plan: StepPlan, given: Tensor | None = None) -> PendingStep:
        """Do the host's part of a plan. On a GPU this returns before the device is done.

        `given`: the output of the stage before, [T, H].
        """
        began, ended_before = self._device.mark(), self._ended
        for ahead in self._ahead:
            ahead.begin(plan)
        self._enter_rows(plan)
        computing = self._copy_pages(plan)
        batch, expanded = host_batch(plan), None
        for ahead in self._ahead:
            batch, expanded = ahead.expand(plan, batch)
        output: StepOutput | None = None
        passed: Passed | None = None
        row_errors: tuple[RowError, ...] = ()
        if self._draws:
            output, row_errors = self._compute(batch, expanded, given)
        else:
            passed = self._pass_on(batch, expanded, given)
        sent: tuple[tuple[int, Put], ...] = ()
        if self._calls.sends and output is not None:
            output, sent = self._with_sent(output)
        for ahead in self._ahead:
            if (put := ahead.sends()) is not None:
                sent += ((0, put),)
        self._ended = self._device.mark()
        download = None if output is None else self._device.download(output.values)
        finish = None
        if download is not None:
            for drawn in self._calls.drawn:
                drawn(download)
            if expanded is not None:
                expanded.download, finish = download, expanded.finish
        return PendingStep(
            step_id=plan.step_id,
            output=download,
            sizes=() if output is None else output.sizes,
            began=began,
            computing=computing,
            ended=self._ended,
            ended_before=ended_before,
            row_errors=row_errors,
            finish=finish,
            take_copy_times=None if self.host_pages is None else self.host_pages.take_times,
            passed=passed,
            sent=sent,
        )

    def _enter_rows(self, plan: StepPlan) -> None:
        """Let the plan's rows come and go: in the row state, and in all that keeps something of some rows.

        What needs the tokens of new rows comes after the row state.
        """
        self._state.apply(plan)
        if self._kv.states is not None:
            self._kv.states.begin(plan, self._device)
        if self._enters_rows:
            for new in plan.new_rows:
                self._model.enter_row(new.row, new.num_prompt_tokens)
        if plan.new_rows or plan.freed_rows:
            for enter in self._enters:
                enter(plan)
            here = [part for part in self.parts if part.rows]
            if here != self._here:
                self._here, self._calls, self._graphs = here, RowCalls.of(here), self._graphs_for(here)

    def _graphs_for(self, here: Sequence[RowPart]) -> _Captured:
        """The graphs in which all that parts with rows do is done."""
        apart = [part for part in here if not part.can_be_captured]
        if not apart:
            return self._captured
        return self._captured_of.get(apart[0], _Captured()) if len(apart) == 1 else _Captured()

    def _copy_pages(self, plan: StepPlan) -> Mark | None:
        """Copy the pages that the plan names; return when copies between tiers, which are timed, were launched."""
        if plan.copy_tiers:
            assert self.host_pages is not None, "there is no host tier"
            self.host_pages.copy(plan)
            return self._device.mark()
        if plan.copy_src:
            src, dst = (np.frombuffer(buffer, dtype=np.int32) for buffer in (plan.copy_src, plan.copy_dst))
            self._kv.copy_pages(self._device.upload(src), self._device.upload(dst))
        return None

    def _pass_on(self, batch: HostBatch, expanded: Expanded | None, given: Tensor | None) -> Passed | None:
        """Compute the layers of this stage, if it is not the last one."""
        if batch.rows.shape[0] == 0:
            return None
        for begins in self._calls.begins:
            begins(batch)
        if self._whole_step is not None and int(batch.num_new.sum()) <= self._whole_step.max_tokens:
            hidden = self._whole_step.compute(batch.rows, batch.start, batch.num_new, batch.sample_idx, given)
        elif (decodes := self._graphs.decodes) is not None and decodes.covers(batch):
            hidden, _ = decodes.replay(batch, given)
        else:
            inputs, _ = make_inputs(batch, self._state, self._device, self._page_size)
            hidden = self._model.forward(inputs._replace(given=given), self._kv)
        note = None if expanded is None else expanded.drawn
        ends = batch.start + batch.num_new
        return Passed(hidden, batch.rows[batch.sample_idx], ends[batch.sample_idx], note)

    def _compute(
        self, batch: HostBatch, expanded: Expanded | None, given: Tensor | None
    ) -> tuple[StepOutput | None, tuple[RowError, ...]]:
        if batch.rows.shape[0] == 0:
            return None, ()
        prompt, sampling = None, None
        num_tokens = int(batch.num_new.sum())
        for begins in self._calls.begins:
            begins(batch)
        images = next((its for inputs in self._calls.inputs if (its := inputs(batch)) is not None), None)
        whole = self._whole_step if images is None and not self._state.has_logprobs else None
        if whole is not None and num_tokens <= whole.max_tokens:
            # One call, since no row needs hidden states in between.
            self._begin_draws(batch, expanded)
            room, drawing = self._room_ahead(num_tokens), self._drawing(batch)
            if self._calls.computed:
                room.setdefault("hidden", self._room_for_hidden(num_tokens))
            samples = batch.sample_idx if drawing is None else batch.sample_idx[drawing]
            logits = whole.compute(batch.rows, batch.start, batch.num_new, samples, given, paths=batch.paths, **room)
            for computed in self._calls.computed:
                computed(batch, room["hidden"])
            if drawing is not None:
                logits = self._spread(logits, drawing, batch.sample_idx.shape[0])
            for ahead in self._ahead:
                ahead.computed(batch, room.get("hidden"), room.get("taps"))
        else:
            hidden, sampling, prompt = self._forward(batch, expanded, given, images)
            logits = self._logits_of(hidden, self._drawing(batch)) if hidden.shape[0] else hidden
        if logits.shape[0] == 0:
            return pack(None, None, prompt), ()
        tokens, drawn, row_errors = self._sample(logits, batch, sampling)
        if self.check_drawn is not None:
            self.check_drawn(tokens)
        return pack(tokens, drawn, prompt), row_errors

    def _room_ahead(self, num_tokens: int) -> dict[str, Tensor]:
        """The buffers for what is wanted of a whole step (`Ahead.wants`), as keyword arguments of `Compute`."""
        room: dict[str, Tensor] = {}
        for ahead in self._ahead:
            for name, num_states in ahead.wants.items():
                room[name] = self._room_for_hidden(num_tokens, num_states)
        return room

    def _room_for_hidden(self, num_tokens: int, num_states: int = 1) -> Tensor:
        """fp32[T, n * H], room for `num_states` hidden states of each position."""
        config = self._model.config
        assert isinstance(config, Decoder)
        return torch.empty(num_tokens, config.hidden_size * num_states)

    def _drawing(self, batch: HostBatch) -> IntArray | None:
        """int64[D], those of the S sampling rows that draw tokens; None if all do."""
        if not self._calls.undrawn:
            return None
        undrawn = {row for part in self._calls.undrawn for row in part.rows}
        rows = batch.rows[batch.sample_idx].tolist()
        drawing = np.array([i for i, row in enumerate(rows) if row not in undrawn], dtype=np.int64)
        return None if drawing.shape[0] == len(rows) else drawing

    def _logits_of(self, hidden: Tensor, drawing: IntArray | None) -> Tensor:
        """Logits [S, V] of [S, H], as `_spread` returns them."""
        if drawing is None:
            return self._model.logits(hidden)
        logits = hidden.new_empty(0, self._model.config.vocab_size)
        if drawing.shape[0]:
            logits = self._model.logits(hidden.index_select(0, self._device.upload(drawing)))
        return self._spread(logits, drawing, hidden.shape[0])

    def _spread(self, logits: Tensor, drawing: IntArray, num_samples: int) -> Tensor:
        """Logits of the rows that draw, [D, V] -> [S, V]; the other rows are zeros, and their tokens are not read."""
        index = self._device.upload(drawing)
        return logits.new_zeros(num_samples, logits.shape[1]).index_copy_(0, index, logits)

    def _with_sent(self, output: StepOutput) -> tuple[StepOutput, tuple[tuple[int, Put], ...]]:
        """The output with what parts send behind it; and the bytes of each, and where they go."""
        found = [its for sends in self._calls.sends if (its := sends()) is not None]
        values = [its.values for its in found if its.values is not None]
        if values:
            output = output._replace(values=torch.cat([output.values, *values]))
        return output, tuple((0 if its.values is None else 4 * its.values.shape[0], its.put) for its in found)

    def _tell(self, batch: HostBatch, hidden: Tensor) -> None:
        """Give parts what `Model.forward` has computed."""
        for computed in self._calls.computed:
            computed(batch, hidden)
        for ahead in self._ahead:
            ahead.computed(batch, hidden, None)

    def _begin_draws(self, batch: HostBatch, expanded: Expanded | None) -> None:
        for begin in self._calls.begin_draws:
            begin(batch.rows[batch.sample_idx], None if expanded is None else expanded.guesses)

    def _forward(
        self, batch: HostBatch, expanded: Expanded | None, given: Tensor | None, images: ImageInputs | None
    ) -> tuple[Tensor, SamplingRows, TokenScores | None]:
        """Hidden states [S, H] of the rows that sample, where their tokens go, and scores of prompt tokens."""
        decodes, mixed = self._graphs if images is None else _Captured()
        if decodes is not None and decodes.covers(batch):
            self._begin_draws(batch, expanded)
            hidden, sampling = decodes.replay(batch, given)
            self._tell(batch, hidden)
            return hidden, sampling, None
        size = None if mixed is None else mixed.size_for(batch)
        sampled: Tensor | None = None
        if mixed is not None and size is not None:
            self._begin_draws(batch, expanded)
            hidden, sampled, sampling = mixed.replay(batch, size)
        else:
            inputs, sampling = make_inputs(batch, self._state, self._device, self._page_size)
            self._begin_draws(batch, expanded)  # not earlier, because two Python threads slow each other down
            hidden = self._model.forward(inputs._replace(given=given, images=images), self._kv)
        self._tell(batch, hidden)
        prompt = None
        if self._state.has_logprobs:
            prompt = prompt_scores(self._model, hidden, batch, self._state, self._device)
        if sampled is not None:
            return sampled, sampling, prompt
        if sampling.logits_indices.shape[0] != hidden.shape[0]:
            hidden = hidden.index_select(0, sampling.logits_indices)
        return hidden, sampling, prompt

    def _sample(
        self, logits: Tensor, batch: HostBatch, sampling: SamplingRows | None
    ) -> tuple[Tensor, TokenScores | None, tuple[RowError, ...]]:
        """Sample from [S, V] logits, and score the sampled tokens where a row asks for it.

        The next step reads the tokens from the row state, whether or not the host has seen them. `sampling` may be
        missing only for logits from the native CPU kernels, because sampling from those does not use it.
        """
        state = self._state
        rows = batch.rows[batch.sample_idx]
        positions = (batch.start + batch.num_new)[batch.sample_idx]
        asking = (state.num_logprobs[rows] >= 0).nonzero()[0] if state.has_logprobs else rows[:0]
        index, raw = None, None
        if asking.shape[0]:
            index = self._device.upload(asking)
            raw = logits.index_select(0, index)  # a copy, because sampling changes the logits
        row_errors: tuple[RowError, ...] = ()
        for mask in self._calls.mask:
            row_errors += mask(logits)
        state.limit_tokens(logits, rows, positions)
        for shape in self._calls.shape:
            row_errors += shape(logits, rows, positions, state.token_ids)
        if state.native_sampler is not None and state.native_sampler.takes(logits):
            tokens = state.native_sampler.draw(logits, rows, positions)
        else:
            assert sampling is not None
            needs = state.needs(rows, positions)
            tokens = sample(logits, sampling.rows, sampling.positions, state.sampling, needs)
        if index is None or raw is None:
            return tokens, None, row_errors
        drawn = tokens.index_select(0, index).clamp_(min=0)  # a row without a token is scored too
        num_best = int(state.num_logprobs[rows].max())
        return tokens, score(raw, drawn, num_best, self._device.library), row_errors
