"""What a program's steps read and write besides their tokens: the pages of all layers, and the states of rows."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.attention.kv_quantization import PageLayout
from penstock.kernels.native.operations.structs import numbers, pointers

KV_KINDS = ("float32", "bfloat16", "int8", "int4", "fp8_e4m3", "fp8_e5m2")  # as enum KvKind in codes.h


class _LayerPages(ctypes.Structure):
    _fields_ = (*pointers("keys", "values"), *numbers("group", "page_size", "head_bytes"))


class _RowStates(ctypes.Structure):
    _fields_ = (*pointers("data"), ("row_size", c_int64))


class _Pool(ctypes.Structure):
    _fields_ = (*pointers("layers", "states"), *numbers("kind"))


class LayerPages(Protocol):
    """One layer's part of all pages."""

    @property
    def keys(self) -> Tensor:
        """[num_pages, Hk, page_size, D], fp32 or bf16, contiguous; if quantized, uint8[num_pages, Hk, head bytes]."""

    @property
    def values(self) -> Tensor:
        """The same shape."""

    @property
    def group(self) -> int:
        """Index of the layer's page group."""

    @property
    def layout(self) -> PageLayout | None:
        """The layout of quantized pages; None for others."""


def _page_size(layer: LayerPages) -> int:
    return layer.keys.shape[2] if layer.layout is None else layer.layout.page_size


def kv_kind(pages: Tensor, layout: PageLayout | None) -> int:
    """The number of a kind of pages, as in enum KvKind in codes.h."""
    return KV_KINDS.index(str(pages.dtype).removeprefix("torch.") if layout is None else layout.format.name)


class NativePool:
    """The pages of all layers, and the states of layers that keep these instead."""

    def __init__(
        self, layers: Sequence[LayerPages], page_sizes: Sequence[int] = (), states: Sequence[Tensor] = ()
    ) -> None:
        """Take the addresses of all pages and states.

        Args:
            layers: the layers with pages.
            page_sizes: tokens in a page of each page group; needed if some groups have no layers here.
            states: fp32[R, ...], numbered as in the operations.
        """
        for state in states:
            if state.dtype != torch.float32 or not state[0].is_contiguous():
                raise ValueError(f"states {tuple(state.shape)} of {state.dtype} must be fp32 and contiguous")
        self._state_tensors = tuple(states)
        self._states = (_RowStates * len(states))(*(_RowStates(its.data_ptr(), its.stride(0)) for its in states))
        self._tensors = [(layer.keys, layer.values) for layer in layers]  # keeps alive what the pointers refer to
        for tensor in (tensor for pair in self._tensors for tensor in pair):
            if not tensor.is_contiguous():
                raise ValueError(f"pages {tuple(tensor.shape)} of strides {tensor.stride()} are not contiguous")
        self._layers = (_LayerPages * len(layers))(
            *(
                _LayerPages(
                    *(layer.keys.data_ptr(), layer.values.data_ptr(), layer.group, _page_size(layer)),
                    0 if layer.layout is None else layer.keys.shape[2],
                )
                for layer in layers
            )
        )
        self.page_sizes = dict(enumerate(page_sizes)) or {layer.group: _page_size(layer) for layer in layers}
        kind = kv_kind(layers[0].keys, layers[0].layout) if layers else 0
        self.struct = _Pool(ctypes.addressof(self._layers), ctypes.addressof(self._states), kind)
