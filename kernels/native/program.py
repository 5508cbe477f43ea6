"""The Python side of a program: its operations as C structs, and the steps that it computes (`program.h`)."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.native.experts import ExpertsStruct, PackedExperts
from penstock.kernels.native.latent import LatentStruct, PackedLatents
from penstock.kernels.native.library import (
    UNIT,
    WEIGHT_KINDS,
    Library,
    LinearStruct,
    PackedLinear,
    address_of,
    kind_of,
    round_up,
)
from penstock.kernels.norms import NormWeights
from penstock.kernels.qk_norm_rope_write import QKNorms

IntArray = npt.NDArray[np.integer]
Int32Array = npt.NDArray[np.int32]
Finish = Literal["store", "add", "activate", "gate"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")  # as enum Activation in activations.h
NORM_KINDS = ("none", "rms", "layer")  # as enum NormKind in norms.h
FINISHES: tuple[Finish, ...] = ("store", "add", "activate", "gate")  # as enum Finish in products.h

_Fields = Sequence[tuple[str, type]]


def _numbers(*names: str) -> _Fields:
    return [(name, c_int32) for name in names]


def _pointers(*names: str) -> _Fields:
    return [(name, c_void_p) for name in names]


class _NormWeights(ctypes.Structure):
    _fields_ = (*_pointers("weight", "bias"), ("eps", c_float), ("kind", c_int32))


class _Embedding(ctypes.Structure):
    _fields_ = (
        ("table", c_void_p),
        ("packed", LinearStruct),
        *_numbers("kind", "size", "to"),
        ("scale", c_float),
    )


class _Positions(ctypes.Structure):
    _fields_ = (*_pointers("table"), *_numbers("kind", "size", "to", "offset"))


class _Norm(ctypes.Structure):
    _fields_ = (("norm", _NormWeights), *_numbers("size", "from_", "to", "is_added"), ("scale", c_float))


class _Heads(ctypes.Structure):
    _fields_ = (
        *(("q_norm", _NormWeights), ("k_norm", _NormWeights)),
        *_numbers("qkv", "num_q_heads", "num_kv_heads", "head_dim", "layer"),
        *_numbers("rotary", "norm_size", "norm_step", "norms_follow_rotation"),
        *(("growth_beta", c_float), ("growth_length", c_float), ("growth_shift", c_int32)),
    )


class _Product(ctypes.Structure):
    _fields_ = (("linear", LinearStruct), *_numbers("from_", "to", "finish", "activation"), ("scale", c_float))


class _Attending(ctypes.Structure):
    _fields_ = (
        *_numbers("qkv", "to", "num_q_heads", "num_kv_heads", "head_dim", "layer", "window"),
        *(("scale", c_float), ("softcap", c_float), ("sinks", c_void_p)),
    )


class _Gating(ctypes.Structure):
    _fields_ = (*_pointers("weights"), *_numbers("num_inputs", "size", "from_", "to"))


class _Mixing(ctypes.Structure):
    _fields_ = (("experts", ExpertsStruct), *_numbers("from_", "to", "is_added"), ("scale", c_float))


class _Latents(ctypes.Structure):
    _fields_ = (("attention", LatentStruct), *_numbers("latents", "q", "to", "layer", "rotary"))


class _KeepingLatents(_Latents):
    pass


class _AttendingLatents(_Latents):
    pass


# As enum OperationKind in program.h.
OPERATIONS = (
    *(_Embedding, _Positions, _Norm, _Heads, _Gating, _KeepingLatents),
    *(_Product, _Attending, _Mixing, _AttendingLatents),
)


class _Operation(ctypes.Structure):
    _fields_ = (*_pointers("what"), *_numbers("kind", "size"))


class _Program(ctypes.Structure):
    _fields_ = (
        *_pointers("operations", "widths"),
        ("head", LinearStruct),
        *_numbers("num_operations", "num_slots", "hidden_size", "packed_width"),
        *(("logit_scale", c_float), ("logit_softcap", c_float)),
    )


class _GroupPages(ctypes.Structure):
    _fields_ = (*_pointers("slots", "page_table"), *_numbers("page_table_stride"))


class _Rotary(ctypes.Structure):
    _fields_ = (*_pointers("cos_sin"), *_numbers("dim", "is_by_position"))


class _Batch(ctypes.Structure):
    _fields_ = (
        *_numbers("num_tokens", "num_rows"),
        *_pointers("input_ids", "positions", "query_start_loc", "seq_lens", "table_rows", "groups", "rotaries", "out"),
    )


class _LayerPages(ctypes.Structure):
    _fields_ = (*_pointers("keys", "values"), *_numbers("group", "page_size"))


class _Pool(ctypes.Structure):
    _fields_ = (*_pointers("layers"), *_numbers("is_bf16"))


class _PageTable(ctypes.Structure):
    _fields_ = (*_pointers("pages"), *_numbers("stride", "page_size"))


class _Rows(ctypes.Structure):
    _fields_ = (
        *_numbers("num_rows", "num_samples", "token_ids_stride", "num_groups"),
        *_pointers("rows", "start", "num_new", "samples", "token_ids", "page_tables", "rotaries"),
    )


class QueryGrowth(NamedTuple):
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + shift) / length))."""

    beta: float = 0.0
    length: float = 1.0
    shift: int = 0


class HeadShape(NamedTuple):
    """What attention computes with."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


class RotaryTable(NamedTuple):
    """The angles of one kind of rotation."""

    cos_sin: Tensor  # fp32[positions or T, rotary_dim]: cosines, then sines
    is_by_position: bool  # or a row for each token


class GroupPages(NamedTuple):
    """Where a batch's tokens are in the pages of one page group."""

    slots: Tensor  # int64[T]; a negative one stores nothing
    page_table: Tensor  # int32[N, max_pages]


class LayerPages(Protocol):
    """One layer's part of all pages."""

    @property
    def keys(self) -> Tensor:
        """[num_pages, Hk, page_size, D], fp32 or bf16, contiguous."""

    @property
    def values(self) -> Tensor:
        """The same shape."""

    @property
    def group(self) -> int:
        """Index of the layer's page group."""


class NativePool:
    """The pages of all layers."""

    def __init__(self, layers: Sequence[LayerPages]) -> None:
        self._tensors = [(layer.keys, layer.values) for layer in layers]  # keeps alive what the pointers refer to
        for tensor in (tensor for pair in self._tensors for tensor in pair):
            if not tensor.is_contiguous():
                raise ValueError(f"pages {tuple(tensor.shape)} of strides {tensor.stride()} are not contiguous")
        self._layers = (_LayerPages * len(layers))(
            *(
                _LayerPages(layer.keys.data_ptr(), layer.values.data_ptr(), layer.group, layer.keys.shape[2])
                for layer in layers
            )
        )
        self.page_sizes = {layer.group: layer.keys.shape[2] for layer in layers}
        is_bf16 = bool(layers) and layers[0].keys.dtype == torch.bfloat16
        self.struct = _Pool(ctypes.addressof(self._layers), is_bf16)


class ProgramBuilder:
    """Collects operations in the order in which they run.

    They read and write slots: rows of floats, one for each token. Slot 0, `OUT`, is the result, [T, H].
    """

    OUT = 0

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._widths = [0]
        self._operations: list[tuple[ctypes.Structure, int]] = []  # and its size
        self._kept: list[object] = []  # what pointers refer to
        self._packed_width = UNIT

    def slot(self, width: int) -> int:
        """A new slot for vectors of this size."""
        self._widths.append(round_up(width, UNIT))
        return len(self._widths) - 1

    def embed(self, embedding: Tensor | PackedLinear, to: int, scale: float = 1.0) -> None:
        """to = scale * embedding[id]; fp32 or bf16 [V, size], or a packed output matrix."""
        if isinstance(embedding, Tensor):
            embedding = embedding.contiguous()
            size, table, packed, kind = embedding.shape[1], embedding.data_ptr(), LinearStruct(), kind_of(embedding)
        else:
            size, table, packed, kind = embedding.num_inputs, None, embedding.struct, embedding.kind
        self._add(_Embedding(table, packed, WEIGHT_KINDS.index(kind), size, to, scale), size, embedding)

    def add_positions(self, table: Tensor, to: int, offset: int = 0) -> None:
        """to += table[position + offset]; fp32 or bf16 [., size]."""
        table = table.contiguous()
        size = table.shape[1]
        kind = WEIGHT_KINDS.index(kind_of(table))
        self._add(_Positions(table.data_ptr(), kind, size, to, offset), size, table)

    def norm(self, norm: NormWeights | None, source: int, to: int, size: int, *, added: float | None = None) -> None:
        """to = norm(source), of `size` floats; or to += added * norm(source), which overwrites `source`."""
        self._add(_Norm(self._norm(norm), size, source, to, added is not None, added or 0.0), size)

    def heads(
        self, qkv: int, shape: HeadShape, layer: int, norms: QKNorms, rotary: int | None, growth: QueryGrowth
    ) -> None:
        """Norm and rotate q and k, in place, and write k and v to the pages of a layer.

        Args:
            qkv: slot with all q heads, all k heads, all v heads.
            shape: of the heads.
            layer: index of the pages.
            norms: of q and k.
            rotary: index of the rotary table; None: positions do not rotate anything.
            growth: of the queries.
        """
        q_heads, kv_heads, dim = shape
        weights = [norm.weight for norm in (norms.q, norms.k) if norm is not None and norm.weight is not None]
        has_own = any(weight.ndim == 2 for weight in weights)
        operation = _Heads(
            *(self._norm(norms.q), self._norm(norms.k), qkv, q_heads, kv_heads, dim, layer),
            *(-1 if rotary is None else rotary, 0 if norms.spans_all else dim, dim if has_own else 0),
            *(norms.follow_rope, *growth),
        )
        self._add(operation, (q_heads + 2 * kv_heads) * dim)

    def attend(
        self,
        qkv: int,
        to: int,
        shape: HeadShape,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend with the q heads of slot `qkv` over the pages of a layer.

        Args:
            qkv: slot that `heads` has changed.
            to: slot of the result, all q heads.
            shape: of the heads.
            layer: index of the pages.
            scale: of the scores.
            window: how many of a row's last positions a query sees.
            softcap: scores become softcap * tanh(score / softcap).
            sinks: [Hq], logits without values in the softmax.
        """
        sinks = None if sinks is None else sinks.float().contiguous()
        self._add(_Attending(qkv, to, *shape, layer, window or 0, scale, softcap, address_of(sinks)), 0, sinks)

    def product(
        self,
        linear: PackedLinear,
        source: int,
        to: int,
        finish: Finish = "store",
        *,
        activation: str = "silu",
        scale: float = 1.0,
    ) -> None:
        """to = sums, to += scale * sums, to = act(sums), or, of gates and ups interleaved, to = act(gate) * up."""
        if linear.interleaved != (finish == "gate"):
            raise ValueError("gates and ups are packed interleaved, other weights are not")
        self._packed_width = max(self._packed_width, round_up(linear.num_inputs, UNIT))
        numbers = (source, to, FINISHES.index(finish), ACTIVATIONS.index(activation))
        self._add(_Product(linear.struct, *numbers, scale), 0, linear)

    def mix(self, experts: PackedExperts, source: int, to: int, *, added: float | None = None) -> None:
        """to = what the experts make of the source, or to += added * that."""
        hidden = experts.struct.router.num_inputs
        self._packed_width = max(self._packed_width, round_up(hidden, UNIT))
        self._add(_Mixing(experts.struct, source, to, added is not None, added or 0.0), 0, experts)

    def attend_to_latents(
        self, attention: PackedLatents, latents: int, q: int, to: int, layer: int, rotary: int
    ) -> None:
        """Norm and rotate new latents and their keys, write them to the pages of a layer, and attend over these.

        Args:
            attention: with its weights.
            latents: slot with latents and keys, [kv_rank + rope_dim].
            q: slot with all heads of the queries; both are changed.
            to: slot of the result, all heads of values.
            layer: index of the pages.
            rotary: index of the rotary table.
        """
        its = attention.struct
        numbers = (latents, q, to, layer, rotary)
        self._add(_KeepingLatents(its, *numbers), its.num_heads * (its.nope_dim + its.rope_dim), attention)
        self._add(_AttendingLatents(its, *numbers))

    def gate(self, weights: Tensor, source: int, to: int, size: int) -> None:
        """to *= sigmoid(weights * source); [H], and `size` floats of `to`."""
        weights = weights.float().contiguous()
        self._add(_Gating(weights.data_ptr(), len(weights), size, source, to), size, weights)

    def build(
        self, library: Library, head: PackedLinear, *, logit_scale: float = 1.0, logit_softcap: float = 0.0
    ) -> "Program":
        """The program, with the output matrix for its results."""
        kinds = [OPERATIONS.index(type(operation)) for operation, _ in self._operations]
        operations = (_Operation * len(kinds))(
            *(
                _Operation(ctypes.addressof(operation), kind, size)
                for kind, (operation, size) in zip(kinds, self._operations, strict=True)
            )
        )
        widths = (c_int32 * len(self._widths))(*self._widths)
        struct = _Program(
            *(ctypes.addressof(operations), ctypes.addressof(widths), head.struct),
            *(len(operations), len(widths), self._hidden_size, self._packed_width),
            *(logit_scale, logit_softcap),
        )
        return Program(library, struct, (self._operations, self._kept, operations, widths, head))

    def _norm(self, norm: NormWeights | None) -> _NormWeights:
        if norm is None:
            return _NormWeights(kind=NORM_KINDS.index("none"))
        weight, bias = (None if vector is None else vector.float().contiguous() for vector in (norm.weight, norm.bias))
        self._kept += [weight, bias]
        return _NormWeights(address_of(weight), address_of(bias), norm.eps, NORM_KINDS.index(norm.kind))

    def _add(self, operation: ctypes.Structure, size: int = 0, *kept: object) -> None:
        self._operations.append((operation, size))
        self._kept += kept


class Program:
    """A model's forward pass. Not thread-safe."""

    def __init__(self, library: Library, struct: _Program, kept: object) -> None:
        self._functions = library.functions
        self._struct = struct
        self._kept = kept  # what the pointers refer to
        self._batch = _Batch()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        groups: Sequence[GroupPages],
        rotaries: Sequence[RotaryTable],
        pool: NativePool,
    ) -> Tensor:
        """Compute a ragged batch of T tokens in N rows, and write their keys and values.

        Args:
            input_ids: int32[T].
            positions: int64[T].
            query_start_loc: int32[N + 1].
            seq_lens: int32[N].
            groups: one for each page group.
            rotaries: as the operations number them.
            pool: of all layers.

        Returns:
            fp32[T, H].
        """
        batch, num_tokens = self._batch, input_ids.shape[0]
        out = torch.empty(num_tokens, self._struct.hidden_size)
        group_structs = (_GroupPages * len(groups))(
            *(_GroupPages(slots.data_ptr(), table.data_ptr(), table.stride(0)) for slots, table in groups)
        )
        rotary_structs = _rotaries(rotaries)
        batch.num_tokens, batch.num_rows = num_tokens, seq_lens.shape[0]
        batch.input_ids, batch.positions = input_ids.data_ptr(), positions.data_ptr()
        batch.query_start_loc, batch.seq_lens = query_start_loc.data_ptr(), seq_lens.data_ptr()
        batch.groups, batch.rotaries = ctypes.addressof(group_structs), ctypes.addressof(rotary_structs)
        batch.out = out.data_ptr()
        self._functions.penstock_forward(ctypes.byref(self._struct), ctypes.byref(pool.struct), ctypes.byref(batch))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32[S, H] -> fp32[S, V]"""
        hidden = hidden.contiguous()
        out = torch.empty(hidden.shape[0], self._struct.head.num_outputs)
        self._functions.penstock_logits(
            *(ctypes.byref(self._struct), c_void_p(hidden.data_ptr())),
            *(c_int32(hidden.shape[0]), c_void_p(out.data_ptr())),
        )
        return out

    def step(
        self, token_ids: Tensor, page_tables: Sequence[Tensor], rotaries: Sequence[Tensor], pool: NativePool
    ) -> "ProgramStep":
        """Steps that read their inputs from tables, with a row for each sequence.

        Args:
            token_ids: int32[R, L], known and sampled ids by position.
            page_tables: int32[R, max_pages] of each page group.
            rotaries: fp32[positions, rotary_dim] each, as the operations number them.
            pool: of all layers.
        """
        return ProgramStep(self._functions, self._struct, token_ids, page_tables, rotaries, pool)


class ProgramStep:
    """See `Program.step`."""

    def __init__(
        self,
        functions: ctypes.CDLL,
        program: _Program,
        token_ids: Tensor,
        page_tables: Sequence[Tensor],
        rotaries: Sequence[Tensor],
        pool: NativePool,
    ) -> None:
        self._functions = functions
        self._program = program
        self._pool = pool
        tables = (_PageTable * len(page_tables))(
            *(
                _PageTable(table.data_ptr(), table.stride(0), pool.page_sizes[group])
                for group, table in enumerate(page_tables)
            )
        )
        rotary_structs = _rotaries([RotaryTable(table, is_by_position=True) for table in rotaries])
        self._kept = (token_ids, page_tables, rotaries, tables, rotary_structs)  # what the pointers refer to
        self._rows = _Rows(
            token_ids_stride=token_ids.stride(0),
            num_groups=len(page_tables),
            token_ids=token_ids.data_ptr(),
            page_tables=ctypes.addressof(tables),
            rotaries=ctypes.addressof(rotary_structs),
        )

    def compute(self, rows: Int32Array, start: Int32Array, num_new: Int32Array, samples: IntArray) -> Tensor:
        """Compute N rows.

        Args:
            rows: int32[N].
            start: int32[N], the first position to compute.
            num_new: int32[N], how many to compute.
            samples: int64[S], ascending: which of the N rows sample.

        Returns:
            fp32[S, V], the logits of each sampling row's last position.
        """
        step = self._rows
        step.num_rows, step.num_samples = rows.shape[0], samples.shape[0]
        step.rows, step.start, step.num_new = rows.ctypes.data, start.ctypes.data, num_new.ctypes.data
        step.samples = samples.ctypes.data
        logits = torch.empty(samples.shape[0], self._program.head.num_outputs)
        self._functions.penstock_step(
            *(ctypes.byref(self._program), ctypes.byref(self._pool.struct), ctypes.byref(step)),
            c_void_p(logits.data_ptr()),
        )
        return logits


def _rotaries(tables: Sequence[RotaryTable]) -> "ctypes.Array[_Rotary]":
    return (_Rotary * len(tables))(
        *(_Rotary(table.cos_sin.data_ptr(), table.cos_sin.shape[1], table.is_by_position) for table in tables)
    )
