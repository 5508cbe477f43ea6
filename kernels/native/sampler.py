"""Sampling with the native CPU kernels: one call samples for all rows of a step."""

import ctypes
from ctypes import c_int32, c_void_p

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.native.library import Library
from penstock.kernels.sampling_state import SamplingState

_TABLES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "top_k", "min_tokens", "num_prompt_tokens"),
    *("token_ids", "stop_ids", "bias_ids", "bias_values"),
)


class _Sampling(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in _TABLES),
        *((name, c_int32) for name in ("max_len", "num_stop_ids", "num_bias_ids")),
    )


class NativeSampler:
    """Samples like `kernels.sampling.sample`, with the rows' parameters at the time of each call."""

    def __init__(self, library: Library, state: SamplingState) -> None:
        self._functions = library.functions
        self._state = state  # keeps alive what the pointers below refer to
        widths = (tensor.shape[1] for tensor in (state.token_ids, state.stop_ids, state.bias_ids))
        self._sampling = _Sampling(*(getattr(state, name).data_ptr() for name in _TABLES), *widths)

    def takes(self, logits: Tensor) -> bool:
        """Whether it can sample from these logits; torch's path can from any."""
        return logits.dtype == torch.float32 and logits.is_contiguous()

    def draw(self, logits: Tensor, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> Tensor:
        """Sample one token per row, and write it to its position of `token_ids`, like `sample`.

        Args:
            logits: fp32[S, V], contiguous; overwritten.
            rows: int32[S], the row of the state for each.
            positions: int32[S], where the sampled tokens go; those before are known.

        Returns:
            int32[S]; negative where there is no token.
        """
        num_rows, vocab_size = logits.shape
        if not self.takes(logits) or not rows.shape == positions.shape == (num_rows,):
            raise ValueError(f"logits {tuple(logits.shape)} of {logits.dtype} do not fit rows {rows.shape}")
        out = torch.empty(num_rows, dtype=torch.int32)
        self._functions.penstock_draw(
            *(ctypes.byref(self._sampling), c_void_p(rows.ctypes.data), c_void_p(positions.ctypes.data)),
            *(c_int32(num_rows), c_void_p(logits.data_ptr()), c_int32(vocab_size), c_void_p(out.data_ptr())),
        )
        return out
