"""The persistent state of the rows: tokens, page tables and sampling parameters, on the device.

A row is described in full once (`NewRow`). Afterwards only pages are appended, and each step writes the
tokens that it samples, so a decode step needs no token ids from outside. What the host must know to launch
a step (how many pages a row has, which sampling features it uses) is mirrored in numpy.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.gpu_worker.devices.device import Device, IntArray
from penstock.gpu_worker.state.token_limits import TokenLimits, has_limits
from penstock.ipc.messages import NewRow, SamplingParams, StepPlan
from penstock.kernels.native.library import NativeSampler
from penstock.kernels.sampling.sampling_state import FLOATS, INTS, SamplingNeeds, SamplingState

_NUM_NEEDS = len(SamplingNeeds._fields)
_PENALTIES = SamplingNeeds._fields.index("penalties")
_MIN_LIST_LEN = 8
_MAX_STOP_IDS, _MAX_BIASES = 512, 1024
"""On a GPU the lists have the maximum length from the start. A longer list would need another kernel, which would be
compiled while requests wait. The CPU reads the full length for each row, so its lists begin short."""


class RowState:
    """R = max_num_seqs rows."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        device: Device,
        other_page_sizes: Sequence[int] = (),
    ) -> None:
        """`page_size` is that of the first page group; the other page groups have page sizes of their own."""
        on = device.torch_device
        self._device = device
        self.token_ids = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int32, device=on)
        tables = [
            torch.zeros(max_num_seqs, math.ceil((max_model_len + 1) / size), dtype=torch.int32, device=on)
            for size in (page_size, *other_page_sizes)
        ]
        self.page_table = tables[0]
        self.window_tables = list(zip(tables[1:], other_page_sizes, strict=True))
        self.mirror: npt.NDArray[np.int32] | None = None
        """int32[R, max_model_len + 1], the host's copy of `token_ids`, as far as known; see `keep_mirror`."""
        self._floats = torch.zeros(len(FLOATS), max_num_seqs, dtype=torch.float32, device=on)
        self._ints = torch.zeros(len(INTS), max_num_seqs, dtype=torch.int64, device=on)
        most = (_MAX_STOP_IDS, _MAX_BIASES)
        num_stop_ids, num_biases = most if device.compiles_launches else (_MIN_LIST_LEN, _MIN_LIST_LEN)
        self._stop_ids = torch.full((max_num_seqs, num_stop_ids), -1, dtype=torch.int32, device=on)
        self._bias_ids = torch.full((max_num_seqs, num_biases), -1, dtype=torch.int32, device=on)
        self._bias_values = torch.zeros(max_num_seqs, num_biases, dtype=torch.float32, device=on)
        self._num_pages = np.zeros(max_num_seqs, dtype=np.int32)
        self._needs = np.zeros((max_num_seqs, _NUM_NEEDS), dtype=np.bool_)
        self._has_lists = np.zeros(max_num_seqs, dtype=np.bool_)
        self._min_len = np.zeros(max_num_seqs, dtype=np.int64)  # from this position on, min_tokens has no effect
        self.num_logprobs = np.full(max_num_seqs, -1, dtype=np.int32)  # for sampled tokens; -1: none
        self.prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int32)  # for prompt tokens; -1: none
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.has_logprobs = False  # whether any row asks for log-probabilities
        self._token_limits = TokenLimits(device)
        self._has_samplers = np.zeros(max_num_seqs, dtype=np.bool_)
        self._set_sampling()

    def clear(self) -> None:
        """Forget all rows."""
        self._num_pages[:] = 0
        self._needs[:] = False
        self._forget_logprobs(slice(None))
        self._token_limits.clear()

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's changes: freed rows, new rows, appended pages, in this order."""
        if plan.freed_rows:
            freed = np.frombuffer(plan.freed_rows, dtype=np.int32)
            self._num_pages[freed] = 0
            self._needs[freed] = False
            if self.has_logprobs:
                self._forget_logprobs(freed)
            if self._token_limits.rows:
                self._token_limits.free(freed.tolist())
        if plan.new_rows:
            self._enter(plan.new_rows)
        if plan.window_pages:
            self._enter_window_pages(np.frombuffer(plan.window_pages, dtype=np.int32).reshape(-1, 4))
        if plan.page_rows:
            rows = np.frombuffer(plan.page_rows, dtype=np.int32)
            counts = np.frombuffer(plan.page_counts, dtype=np.int32)
            self._write(self.page_table, rows, self._num_pages[rows], counts, plan.page_ids)
            self._num_pages[rows] += counts

    def keep_mirror(self) -> None:
        """Keep a copy of the rows' tokens on the host from now on. On a CPU the host can read them anyway."""
        if self.token_ids.device.type != "cpu":
            self.mirror = np.zeros(self.token_ids.shape, dtype=np.int32)

    def host_tokens(self, row: int) -> npt.NDArray[np.int32]:
        """int32[max_model_len + 1], a view of a row's tokens; entries after its last token are arbitrary."""
        view: npt.NDArray[np.int32] = self.host_table()[row]
        return view

    def host_table(self) -> npt.NDArray[np.int32]:
        """int32[R, max_model_len + 1], the same view for all rows."""
        return self.token_ids.numpy() if self.mirror is None else self.mirror

    def use_dummy_page(self, row: int, page_id: int) -> None:
        """Make a row read and write a single page, in all groups."""
        for table in (self.page_table, *(table for table, _ in self.window_tables)):
            table[row] = page_id

    def _enter_window_pages(self, pages: npt.NDArray[np.int32]) -> None:
        """[W, 4]: page group, row, index, page. Older entries stay, because nothing reads behind a window."""
        for number, (table, _) in enumerate(self.window_tables, 1):
            _, rows, places, page_ids = pages[pages[:, 0] == number].T
            self._write(table, rows, places, np.ones_like(rows), page_ids.tobytes())

    def write_tokens(self, rows: npt.NDArray[np.int32], starts: IntArray, counts: IntArray, token_ids: bytes) -> None:
        """Write the next `counts[i]` token ids (int32) to row `rows[i]`, from position `starts[i]` on."""
        self._write(self.token_ids, rows, starts.astype(np.int32), counts.astype(np.int32), token_ids)

    def needs(self, rows: IntArray, positions: IntArray) -> SamplingNeeds:
        """Return the sampling features that at least one of the sampling rows needs.

        Args:
            rows: int[S].
            positions: int[S], where the sampled tokens will be.
        """
        needs = SamplingNeeds(*np.any(self._needs[rows], axis=0).tolist())
        if needs.min_tokens:
            return needs._replace(min_tokens=bool((positions < self._min_len[rows]).any()))
        return needs

    def looks_back(self, row: int) -> bool:
        """Whether a row's sampling itself depends on its earlier tokens: penalties, banned words, samplers."""
        return bool(self._needs[row, _PENALTIES] or self._has_samplers[row]) or row in self._token_limits.rows

    @property
    def limits_tokens(self) -> bool:
        """Whether `limit_tokens` has something to do."""
        return bool(self._token_limits.rows)

    def limit_tokens(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> None:
        """Mask tokens that a row must not sample, in logits [S, V] in place. Other arguments are those of `needs`."""
        if self._token_limits.rows:
            self._token_limits.apply(logits, rows.tolist(), positions.tolist(), self.token_ids)

    def _forget_logprobs(self, rows: IntArray | slice) -> None:
        self.num_logprobs[rows] = -1
        self.prompt_logprobs[rows] = -1
        self.has_logprobs = bool((self.num_logprobs >= 0).any() or (self.prompt_logprobs >= 0).any())

    def _enter(self, new_rows: Sequence[NewRow]) -> None:
        rows = np.array([new.row for new in new_rows], dtype=np.int32)
        zeros = np.zeros(len(rows), dtype=np.int32)
        num_tokens = np.array([len(new.token_ids) // 4 for new in new_rows], dtype=np.int32)
        self._write(self.token_ids, rows, zeros, num_tokens, b"".join(new.token_ids for new in new_rows))
        if self.mirror is not None:
            for new in new_rows:
                self.mirror[new.row, : len(new.token_ids) // 4] = np.frombuffer(new.token_ids, dtype=np.int32)
        num_pages = np.array([len(new.page_ids) // 4 for new in new_rows], dtype=np.int32)
        self._write(self.page_table, rows, zeros, num_pages, b"".join(new.page_ids for new in new_rows))
        self._num_pages[rows] = num_pages
        sampling = [new.sampling for new in new_rows]
        floats = [[getattr(params, name) for params in sampling] for name in FLOATS]
        of_rows = {"num_prompt_tokens": [new.num_prompt_tokens for new in new_rows]}
        ints = [of_rows.get(name) or [getattr(params, name) for params in sampling] for name in INTS]
        upload = self._device.upload
        index = upload(rows.astype(np.int64))
        self._floats.index_copy_(1, index, upload(np.array(floats, dtype=np.float32)))
        self._ints.index_copy_(1, index, upload(np.array(ints, dtype=np.int64)))
        self._write_lists(rows, sampling)
        self._needs[rows] = [_needs_of(params) for params in sampling]
        self._has_samplers[rows] = [bool(params.samplers) for params in sampling]
        self._min_len[rows] = [new.num_prompt_tokens + new.sampling.min_tokens for new in new_rows]
        self.num_logprobs[rows] = [params.num_logprobs for params in sampling]
        self.prompt_logprobs[rows] = [params.prompt_logprobs for params in sampling]
        self.num_prompt_tokens[rows] = [new.num_prompt_tokens for new in new_rows]
        if any(params.num_logprobs >= 0 or params.prompt_logprobs >= 0 for params in sampling):
            self.has_logprobs = True
        if self._token_limits.rows or any(map(has_limits, sampling)):
            self._token_limits.enter(new_rows)

    def _write_lists(self, rows: npt.NDArray[np.int32], sampling: Sequence[SamplingParams]) -> None:
        """Write stop ids and logit biases. They are rare and ragged, so the tables get wider when a row needs it."""
        with_stops = [(row, p.stop_token_ids) for row, p in zip(rows.tolist(), sampling, strict=True) if p.min_tokens]
        with_bias = [(row, p.logit_bias) for row, p in zip(rows.tolist(), sampling, strict=True) if p.logit_bias]
        upload = self._device.upload
        stale = rows[self._has_lists[rows]]
        if stale.shape[0]:  # lists of the row's previous sequence
            index = upload(stale.astype(np.int64))
            self._stop_ids.index_fill_(0, index, -1)
            self._bias_ids.index_fill_(0, index, -1)
            self._has_lists[stale] = False
        if not with_stops and not with_bias:
            return
        self._has_lists[[row for row, _ in (*with_stops, *with_bias)]] = True
        self._stop_ids = _widened(self._stop_ids, max((len(ids) for _, ids in with_stops), default=0), -1)
        self._bias_ids = _widened(self._bias_ids, max((len(bias) for _, bias in with_bias), default=0), -1)
        self._bias_values = _widened(self._bias_values, self._bias_ids.shape[1], 0)
        for row, ids in with_stops:
            self._stop_ids[row, : len(ids)] = upload(np.array(ids, dtype=np.int32))
        for row, bias in with_bias:
            self._bias_ids[row, : len(bias)] = upload(np.array([i for i, _ in bias], dtype=np.int32))
            self._bias_values[row, : len(bias)] = upload(np.array([x for _, x in bias], dtype=np.float32))
        self._set_sampling()

    def _write(
        self,
        table: torch.Tensor,
        rows: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        values: bytes,
    ) -> None:
        flat = np.frombuffer(values, dtype=np.int32)
        if flat.shape[0] == 0:
            return
        self._device.write_runs(table, rows, starts, counts, flat)

    def _set_sampling(self) -> None:
        lists = (self._stop_ids, self._bias_ids, self._bias_values)
        self.sampling = SamplingState._make((*self._floats.unbind(0), *self._ints.unbind(0), self.token_ids, *lists))
        library = self._device.library
        self.native_sampler = None if library is None else NativeSampler(library, self.sampling)


def _needs_of(params: SamplingParams) -> SamplingNeeds:
    random = params.temperature > 0
    return SamplingNeeds(
        random=random,
        bias=bool(params.logit_bias),
        min_tokens=bool(params.min_tokens and params.stop_token_ids),
        penalties=params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0,
        min_p=random and params.min_p > 0,
        top_k=random and params.top_k > 0,
        top_p=random and params.top_p < 1,
    )


def _widened(table: torch.Tensor, width: int, fill: int) -> torch.Tensor:
    """The table with at least `width` columns (a power of two)."""
    if width <= table.shape[1]:
        return table
    wider = table.new_full((table.shape[0], 1 << (width - 1).bit_length()), fill)
    wider[:, : table.shape[1]] = table
    return wider
