"""The last hidden states of each row, which are kept until the tokens that follow them are known."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device
from penstock.parts.drafts.worker.drafter import Int32Array

_NO_POSITION = -1


class HiddenStates:
    """A ring buffer of the last W positions of each of R rows: position p is at place p mod W."""

    def __init__(self, num_rows: int, num_kept: int, hidden_size: int, dtype: torch.dtype, device: Device) -> None:
        self.num_kept = num_kept
        self._upload = device.upload
        self.states = torch.zeros(num_rows * num_kept, hidden_size, dtype=dtype, device=device.torch_device)
        """[R * W, H]"""
        self.positions: Int32Array = np.full((num_rows, num_kept), _NO_POSITION, dtype=np.int32)
        """[R, W], the position of each hidden state."""

    def forget(self, rows: Int32Array | slice) -> None:
        """Drop the hidden states of these rows: other sequences are in them now."""
        self.positions[rows] = _NO_POSITION

    def keep_last(self, rows: Int32Array, start: Int32Array, num_new: Int32Array, hidden: Tensor) -> None:
        """Keep the hidden state of the last position that each of N rows has computed.

        Args:
            rows: int32[N], each once or, with drafts, once for each position.
            start: int32[N], their first positions.
            num_new: int32[N], how many positions each has computed (T in all).
            hidden: [T, H].
        """
        positions = start + num_new - 1
        if hidden.shape[0] > rows.shape[0]:
            hidden = hidden.index_select(0, self._upload(num_new.cumsum() - 1))
        within = positions % self.num_kept
        self.states.index_copy_(
            0, self._upload(rows.astype(np.int64) * self.num_kept + within), hidden.to(self.states.dtype)
        )
        self.positions[rows, within] = positions

    def move(self, rows: Int32Array, sources: Int32Array, targets: Int32Array) -> None:
        """Make what was kept for positions `sources` that of positions `targets`; int32[M] each, moved all at once."""
        self.states.index_copy_(0, self._upload(self._places(rows, targets)), self.of(rows, sources))
        self.positions[rows, targets % self.num_kept] = targets

    def has(self, rows: Int32Array, positions: Int32Array) -> npt.NDArray[np.bool_]:
        """bool[N]: whether these positions are kept."""
        found: npt.NDArray[np.bool_] = self.positions[rows, positions % self.num_kept] == positions
        return found & (positions >= 0)

    def first_kept(self, rows: Int32Array, least: Int32Array, positions: Int32Array) -> Int32Array:
        """int32[N], the begin of each row's run of kept positions that ends at `positions`, not before `least`.

        If not even that last position is kept, it is `positions` + 1.
        """
        runs = positions[:, None] - np.arange(min(self.num_kept, 1 + int((positions - least).max())), dtype=np.int32)
        is_kept = self.positions[rows[:, None], runs % self.num_kept] == runs
        is_kept &= runs >= least[:, None]
        found: Int32Array = positions + 1 - np.logical_and.accumulate(is_kept, axis=1).sum(axis=1, dtype=np.int32)
        return found

    def of(self, rows: Int32Array, positions: Int32Array) -> Tensor:
        """[N, H], a new tensor: the hidden states of positions that are kept."""
        return self.states.index_select(0, self._upload(self._places(rows, positions)))

    def _places(self, rows: Int32Array, positions: Int32Array) -> np.ndarray:
        return rows.astype(np.int64) * self.num_kept + positions % self.num_kept
