"""Attention without a direction on the native CPU kernels, and the activations between products."""

import ctypes
from ctypes import c_float, c_int32, c_void_p

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.activation import Activation
from penstock.kernels.attention.ragged_attention import RaggedRows
from penstock.kernels.native.library import Library
from penstock.kernels.native.program.builder import ACTIVATIONS

_FP32 = 0  # as KvKind
WIDTH = 16
"""Widths of activations must be multiples of this."""


class AttentionShape(ctypes.Structure):
    """As in `blocks.h`."""

    _fields_ = (
        *((name, c_int32) for name in ("num_q_heads", "num_kv_heads", "head_dim", "page_size", "window")),
        ("scale", c_float),
        ("value_dim", c_int32),
        ("softcap", c_float),
        ("sinks", c_void_p),
        *(("head_bytes", c_int32), ("entry_dim", c_int32)),
    )


class AttentionRows(ctypes.Structure):
    """As in `attention.h`."""

    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "page_table_stride")),
        *((name, c_void_p) for name in ("query_start_loc", "seq_lens", "page_table", "table_rows", "paths")),
        *(("path_stride", c_int32), ("path_rows", c_void_p), ("last_seen", c_void_p)),
    )


class NativeRows:
    """The rows of a step, as the kernels see them: each token is a page of its own, which lives as long as the step."""

    def __init__(self, rows: RaggedRows) -> None:
        lens = rows.lens.astype(np.int32)
        starts = np.cumsum(lens, dtype=np.int32) - lens
        self._lens = lens
        self._starts = rows.query_start_loc.contiguous()
        self._table = starts[:, None] + np.arange(lens.max(), dtype=np.int32)
        self._places = (np.arange(lens.sum(), dtype=np.int32) - np.repeat(starts, lens), np.repeat(lens, lens))
        self._last_seen: dict[int | None, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}

    def attend(self, library: Library, qkv: Tensor, scale: float, reach: int | None = None) -> Tensor:
        """As `ragged_attention`, in fp32, with the same bits in any batch."""
        num_tokens, _, num_heads, head_dim = qkv.shape
        q, k, v = (part.contiguous() for part in qkv.unbind(1))
        positions, lens = self._places
        if reach not in self._last_seen:
            ends = lens - 1 if reach is None else np.minimum(lens - 1, positions + reach)
            self._last_seen[reach] = ends.astype(np.int32)
        shape = AttentionShape(num_heads, num_heads, head_dim, 1, 0 if reach is None else reach + 1, scale)
        rows = AttentionRows(len(self._lens), self._table.shape[1], self._starts.data_ptr(), self._lens.ctypes.data)
        rows.page_table, rows.last_seen = self._table.ctypes.data, self._last_seen[reach].ctypes.data
        out = torch.empty(num_tokens, num_heads, head_dim)
        stride = c_int32(num_heads * head_dim)
        library.functions.penstock_attention(
            *(ctypes.byref(shape), c_void_p(k.data_ptr()), c_void_p(v.data_ptr()), c_int32(_FP32)),
            *(ctypes.byref(rows), c_void_p(q.data_ptr()), stride, c_void_p(out.data_ptr()), stride),
        )
        return out


def activate(library: Library, x: Tensor, activation: Activation) -> Tensor:
    """An activation, with the same bits wherever a token is in a batch.

    Args:
        library: the kernels.
        x: fp32[T, I], or [T, 2 * I] if it is gated; I is a multiple of `WIDTH`. Its rows may be apart.
        activation: any.

    Returns:
        fp32[T, I].
    """
    width = x.shape[1] // (1 + activation.is_gated)
    if x.dtype != torch.float32 or width % WIDTH or x.stride(1) != 1 or x.stride(0) % WIDTH:
        raise ValueError(f"cannot activate {tuple(x.shape)} of {x.dtype}: need fp32, and widths of {WIDTH}")
    out = torch.empty(x.shape[0], width)
    library.functions.penstock_activate(
        *(c_int32(ACTIVATIONS.index(activation.kind)), c_int32(activation.is_gated), c_void_p(x.data_ptr())),
        *(c_int32(x.stride(0)), c_int32(x.shape[0]), c_int32(width), c_void_p(out.data_ptr()), c_int32(width)),
    )
    return out
