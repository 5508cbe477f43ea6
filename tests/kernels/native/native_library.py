"""The compiled CPU kernels for tests, and their parts as functions of tensors."""

import ctypes
import os
from ctypes import c_int32, c_void_p
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.attention.kv_quantization import PageLayout
from penstock.kernels.experts.routing import Routing
from penstock.kernels.native import build
from penstock.kernels.native.attention.latents import NativeIndexer, PackedLatents
from penstock.kernels.native.attention.ragged import AttentionRows, AttentionShape
from penstock.kernels.native.experts.packed import PackedExperts, routing_struct
from penstock.kernels.native.library import UNIT, Library, PackedLinear
from penstock.kernels.native.pool import kv_kind


def load_library(num_threads: int) -> Library:
    """With helpers that take part however little there is to do, and products of bf16 on any processor.

    Skips where there is no compiler.
    """
    try:
        built = Path(path) if (path := os.environ.get("PENSTOCK_TEST_KERNELS")) else build.build()
        library = Library(built, num_threads, worth_waking=0)
        library.multiplies_bf16 = True
        return library
    except build.BuildError as error:
        pytest.skip(str(error))


def pointer(tensor: Tensor | None) -> c_void_p:
    """Of its first number; null for None."""
    return c_void_p(None if tensor is None else tensor.data_ptr())


def native_attention(
    library: Library,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    value_dim: int = 0,
    layout: PageLayout | None = None,
    paths: Tensor | None = None,
    last_seen: Tensor | None = None,
) -> Tensor:
    """As `paged_attention`, but plain v_pages [num_pages, Hk, page_size, Dv] may have another size, or be the first
    `value_dim` numbers of the keys; q and the result are fp32. `last_seen`: int32[T], if that is not the own position.
    """
    _, num_q_heads, head_dim = q.shape
    value_dim = value_dim or (head_dim if v_pages is None or layout is not None else v_pages.shape[3])
    pages = (k_pages,) if v_pages is None else (k_pages, v_pages)
    assert q.dtype == torch.float32
    assert all(tensor.is_contiguous() for tensor in (q, page_table, *pages))
    page_size, head_bytes = (k_pages.shape[2], 0) if layout is None else (layout.page_size, k_pages.shape[2])
    shape = AttentionShape(num_q_heads, k_pages.shape[1], head_dim, page_size, window or 0, scale, value_dim, softcap)
    shape.head_bytes = head_bytes
    shape.sinks = None if sinks is None else sinks.data_ptr()
    tables = (tensor.data_ptr() for tensor in (query_start_loc, seq_lens, page_table))
    rows = AttentionRows(seq_lens.shape[0], page_table.stride(0), *tables)
    if paths is not None:
        rows.paths, rows.path_stride = paths.data_ptr(), paths.stride(0)
    if last_seen is not None:
        rows.last_seen = last_seen.data_ptr()
    out = torch.full((q.shape[0], num_q_heads, value_dim), torch.nan)
    library.functions.penstock_attention(
        *(ctypes.byref(shape), pointer(k_pages), pointer(v_pages), c_int32(kv_kind(k_pages, layout))),
        *(ctypes.byref(rows), pointer(q), c_int32(q.stride(0)), pointer(out), c_int32(out.stride(0))),
    )
    return out


def native_route(
    library: Library, logits: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `route`."""
    num_tokens, num_experts = logits.shape
    ids, weights = torch.empty(num_tokens, routing.top_k, dtype=torch.int32), torch.empty(num_tokens, routing.top_k)
    struct, logits = routing_struct(routing, num_experts, correction), logits.clone()
    library.functions.penstock_route(
        *(ctypes.byref(struct), pointer(logits), c_int32(num_tokens), pointer(ids), pointer(weights))
    )
    return ids, weights


def native_linear(library: Library, linear: PackedLinear, x: Tensor) -> Tensor:
    """fp32[T, K] -> fp32[T, num_packed], in the order in which outputs are packed"""
    padded = functional.pad(x, (0, -x.shape[1] % UNIT))
    packed, out = torch.empty(len(x), linear.packed_width), torch.full((len(x), linear.num_packed), torch.nan)
    library.functions.penstock_linear(
        *(ctypes.byref(linear.struct), pointer(padded), c_int32(padded.shape[1]), c_int32(len(x))),
        *(pointer(packed), pointer(out), c_int32(out.shape[1])),
    )
    return out


def native_experts(
    library: Library, experts: PackedExperts, x: Tensor, turns: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """fp32 [T, H] -> fp32 [T, H]; `turns`: ids int32[T] and positions int64[T]."""
    num_tokens, hidden = x.shape
    padded = functional.pad(x, (0, -hidden % UNIT))
    packed, out = torch.empty_like(padded), torch.full_like(padded, torch.nan)
    stride = c_int32(padded.shape[1])
    library.functions.penstock_experts(
        *(ctypes.byref(experts.struct), pointer(padded), stride, c_int32(num_tokens)),
        *(map(pointer, turns) if turns is not None else (None, None)),
        *(pointer(packed), pointer(out), stride),
    )
    return out[:, :hidden]


def native_latent_attention(
    library: Library,
    latents: PackedLatents,
    pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    new: Tensor,
    q: Tensor,
) -> Tensor:
    """Keep what is `new` [T, kv_rank + rope_dim], and attend from q [T, Hq, nope_dim + rope_dim] -> [T, Hq, v_dim]."""
    new, q = new.clone(), q.clone()
    out = torch.full((*q.shape[:2], latents.struct.v_dim), torch.nan)
    tables = (tensor.data_ptr() for tensor in (query_start_loc, seq_lens, page_table))
    rows = AttentionRows(seq_lens.shape[0], page_table.stride(0), *tables)
    library.functions.penstock_latent_attention(
        *(ctypes.byref(latents.struct), pointer(pages), c_int32(pages.dtype == torch.bfloat16), ctypes.byref(rows)),
        *(pointer(new), c_int32(new.stride(0)), pointer(cos_sin), pointer(slots)),
        *(pointer(q), c_int32(q.stride(0)), pointer(out), c_int32(out.stride(0))),
    )
    return out


def native_choice(
    library: Library,
    indexer: NativeIndexer,
    pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    k: Tensor,
    q: Tensor,
    weights: Tensor,
) -> Tensor:
    """Keep index keys k [T, Di], and choose with q [T, Hi, Di] and weights [T, Hi] -> positions int32[T, top_k].

    The last results are also what `native_latent_attention` attends to. Rows of tokens that see all are -1.
    """
    k, q = k.clone(), q.clone()
    places = torch.full((q.shape[0], indexer.struct.top_k), -1, dtype=torch.int32)
    tables = (tensor.data_ptr() for tensor in (query_start_loc, seq_lens, page_table))
    rows = AttentionRows(seq_lens.shape[0], page_table.stride(0), *tables)
    library.functions.penstock_choose(
        *(ctypes.byref(indexer.struct), c_int32(pages.shape[2]), pointer(pages)),
        *(c_int32(pages.dtype == torch.bfloat16), ctypes.byref(rows), pointer(k), pointer(q), pointer(weights)),
        *(pointer(cos_sin), pointer(slots), pointer(places)),
    )
    return places
