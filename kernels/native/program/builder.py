"""Builds a program: the list of a model's operations, as C structs (`program.h`)."""

import ctypes
from collections.abc import Sequence
from copy import copy
from ctypes import c_int32
from typing import Literal, NamedTuple

from torch import Tensor

from penstock.kernels.attention.kv_quantization import KVScales
from penstock.kernels.attention.qk_norm_rope_write import QKNorms
from penstock.kernels.native.adapting import NativeAdapters
from penstock.kernels.native.attention.latents import NativeIndexer, PackedLatents
from penstock.kernels.native.experts.packed import PackedExperts
from penstock.kernels.native.library import (
    UNIT,
    WEIGHT_KINDS,
    Library,
    LinearStruct,
    PackedLinear,
    address_of,
    kind_of,
)
from penstock.kernels.native.operations import structs
from penstock.kernels.native.operations.structs import numbers, pointers
from penstock.kernels.native.program.program import Program, ProgramStruct
from penstock.kernels.native.quantized.layout import round_up
from penstock.kernels.native.ranks.group import DistantRanks, SharedRanks
from penstock.kernels.norms import NormWeights

Finish = Literal["store", "add", "activate", "gate", "gate_stored"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")  # as enum Activation in activations.h
NORM_KINDS = ("none", "rms", "layer")  # as enum NormKind in norms.h
FINISHES: tuple[Finish, ...] = ("store", "add", "activate", "gate", "gate_stored")  # as enum Finish in products.h

_MOST_AHEAD = 512 << 10
"""Bytes of the next weights that a core prefetches into its own cache while it waits."""


class _Operation(ctypes.Structure):
    _fields_ = (*pointers("what"), *numbers("kind", "size"))


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


class ProgramBuilder:
    """Collects operations in the order in which they run.

    Operations read and write slots: rows of floats, one for each token. Slot 0, `OUT`, is the result, [T, H]. A program
    that does not begin with token ids finds its input there.
    """

    OUT = 0

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._widths = [0]
        self._operations: list[tuple[ctypes.Structure, int]] = []  # with the size of each
        self._kept: list[object] = []  # keeps alive what pointers refer to
        self._packed_width = UNIT
        self.adapters: int | None = None  # the address of an `AdaptersStruct`
        self._waiting: structs.Reducing | None = None  # the last one, until the weights that follow it are known

    def slot(self, width: int) -> int:
        """A new slot for vectors of this size."""
        self._widths.append(round_up(width, UNIT))
        return len(self._widths) - 1

    def embed(
        self, embedding: Tensor | PackedLinear, to: int, scale: float = 1.0, first: int = 0, without_id: int = -1
    ) -> None:
        """to = scale * embedding[id - first]; fp32 or bf16 [V, size], or a packed output matrix. Other ids give 0.

        Tokens without an id (-1) get the row `without_id`; if there is none, the vectors that they are given.
        """
        if isinstance(embedding, Tensor):
            embedding = embedding.contiguous()
            num_rows, size = embedding.shape
            table, packed, kind = embedding.data_ptr(), LinearStruct(), kind_of(embedding)
        else:
            num_rows, size = embedding.num_outputs, embedding.num_inputs
            table, packed, kind = None, embedding.struct, embedding.kind
        rows = (first, num_rows)
        struct = structs.Embedding(table, packed, WEIGHT_KINDS.index(kind), size, to, *rows, scale, without_id)
        self.append(struct, size, embedding)

    def add_positions(self, table: Tensor, to: int, offset: int = 0) -> None:
        """to += table[position + offset]; fp32 or bf16 [., size]."""
        table = table.contiguous()
        size = table.shape[1]
        kind = WEIGHT_KINDS.index(kind_of(table))
        self.append(structs.Positions(table.data_ptr(), kind, size, to, offset), size, table)

    def norm(
        self,
        norm: NormWeights | None,
        source: int,
        to: int,
        size: int,
        *,
        added: float | None = None,
        count: int = 1,
        begin: int = 0,
        first: int = 0,
    ) -> None:
        """to = norm(source), for each of `count` adjacent vectors of `size` floats.

        They are read from `begin` on in `source`, and written from `first` on in `to`.

        Or, with `added`, to += added * norm(source), which overwrites `source`.
        """
        operation = structs.Norm(
            self._norm(norm), size, count, source, begin, to, first, added is not None, added or 0.0
        )
        self.append(operation, size * count)

    def scale(
        self, to: int, size: int, by: float, source: int | None = None, first: int = 0, *, begin: int = 0
    ) -> None:
        """to *= by, for `size` floats from `begin` on; with a source, also *= its floats from `first` on."""
        self.append(structs.Scaling(size, -1 if source is None else source, first, to, begin, by), size)

    def heads(
        self,
        qkv: int,
        shape: HeadShape,
        layer: int,
        norms: QKNorms,
        rotary: int | None,
        growth: QueryGrowth,
        kv_scales: KVScales | None = None,
        *,
        gap: int = 0,
    ) -> None:
        """Norm and rotate q and k, in place, and write k and v to the pages of a layer.

        Args:
            qkv: slot with all q heads, all k heads, all v heads.
            shape: of the heads; without KV heads there is only q, and nothing is written.
            layer: index of the pages.
            norms: of q, k and v.
            rotary: index of the rotary table; None: no rotation.
            growth: of the queries.
            kv_scales: the checkpoint's, for quantized pages.
            gap: floats between q and k.
        """
        q_heads, kv_heads, dim = shape
        weights = [norm.weight for norm in (norms.q, norms.k) if norm is not None and norm.weight is not None]
        has_own = any(weight.ndim == 2 for weight in weights)
        operation = structs.Heads(
            *(self._norm(norms.q), self._norm(norms.k), self._norm(norms.v), qkv, q_heads, kv_heads, dim, layer),
            *(-1 if rotary is None else rotary, 0 if norms.spans_all else dim, dim if has_own else 0),
            *(norms.follow_rope, *growth, *(kv_scales or (0.0, 0.0)), gap),
        )
        self.append(operation, (q_heads + 2 * kv_heads) * dim)

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
            window: as in `paged_attention`.
            softcap: scores become softcap * tanh(score / softcap).
            sinks: [Hq], logits without values in the softmax.
        """
        sinks = None if sinks is None else sinks.float().contiguous()
        self.append(structs.Attending(qkv, to, *shape, layer, window or 0, scale, softcap, address_of(sinks)), 0, sinks)

    def product(
        self,
        linear: PackedLinear,
        source: int,
        to: int,
        finish: Finish = "store",
        *,
        activation: str = "silu",
        scale: float = 1.0,
        first: int = 0,
    ) -> None:
        """to = sums, to += scale * sums, to = act(sums) or, for interleaved gates and ups, to = act(scale * gate) * up.

        With "gate_stored" the gates are in `to` already: to = act(scale * to) * sums. Outputs begin at `first` in `to`.
        They are written in whole units, so floats after them in `to` must be computed later.
        """
        if linear.interleaved != (finish == "gate"):
            raise ValueError("gates and ups are packed interleaved, other weights are not")
        self._packed_width = max(self._packed_width, linear.packed_width)
        self._widths[to] = max(self._widths[to], first + linear.num_packed // (1 + linear.interleaved))
        self._follow(linear)
        places = (source, to, first, FINISHES.index(finish), ACTIVATIONS.index(activation), linear.site)
        self.append(structs.Product(linear.struct, *places, scale), 0, linear)

    def reduce(
        self, ranks: SharedRanks | DistantRanks, source: int, to: int, size: int, *, added: float | None = None
    ) -> None:
        """to = sums of the source over all ranks, or to += added * sums, for `size` floats; same bits on all ranks."""
        group = ctypes.addressof(ranks.struct)
        self._waiting = structs.Reducing(group, None, 0, size, source, to, added is not None, added or 0.0)
        self.append(self._waiting, 0, ranks)

    def mix(
        self, experts: PackedExperts, source: int, to: int, *, added: float | None = None, judged: int | None = None
    ) -> None:
        """to = experts(source), or to += added * experts(source); the router reads `judged`, or else the source.

        The slots `judged` and `source` have the same width.
        """
        hidden = experts.struct.router.num_inputs
        self._packed_width = max(self._packed_width, round_up(hidden, UNIT))
        judged = source if judged is None else judged
        self._waiting = None
        self.append(structs.Mixing(experts.struct, source, judged, to, added is not None, added or 0.0), 0, experts)

    def attend_to_latents(
        self, attention: PackedLatents, latents: int, q: int, to: int, layer: int, rotary: int | None
    ) -> None:
        """Norm and rotate new latents and their keys, write them to the pages of a layer, and attend over the pages.

        Args:
            attention: the attention with its weights.
            latents: slot with latents and keys, [kv_rank + rope_dim]; it is changed.
            q: slot with all heads of the queries; it is changed.
            to: slot of the result, all heads of values.
            layer: index of the pages.
            rotary: index of the rotary table; None: no rotation.
        """
        its = attention.struct
        places = (latents, q, to, layer, -1 if rotary is None else rotary)
        self.append(structs.KeepingLatents(its, *places), its.num_heads * (its.nope_dim + its.rope_dim), attention)
        self.append(structs.AttendingLatents(its, *places))

    def choose(self, indexer: NativeIndexer, k: int, q: int, weights: int, layer: int, rotary: int) -> None:
        """Keep index keys in the pages of a layer, and choose what tokens attend to until the next choice.

        Args:
            indexer: the indexer with its norm.
            k: slot with index keys; it is changed.
            q: slot with all heads of the index queries; it is changed.
            weights: slot with the weights of these heads.
            layer: index of the pages.
            rotary: index of the rotary table.
        """
        its = indexer.struct
        places = (k, q, weights, layer, rotary)
        self.append(structs.KeepingIndexKeys(its, *places), (its.num_heads + 1) * its.head_dim, indexer)
        self.append(structs.Choosing(its, *places))

    def gate(self, weights: Tensor, source: int, to: int, size: int) -> None:
        """to *= sigmoid(weights * source), for weights [H] and `size` floats of `to`."""
        weights = weights.float().contiguous()
        self.append(structs.Gating(weights.data_ptr(), len(weights), size, source, to), size, weights)

    def tap(self, places: Sequence[int], source: int, size: int) -> int:
        """Hand out `size` floats of a slot before each of these operations, given as earlier `num_operations`.

        Returns:
            The number of floats for each token over all places; they are in the order of the places.
        """
        width = size * len(places)
        for index, place in sorted(enumerate(places), key=lambda each: each[1], reverse=True):
            tapping = structs.Tapping(source, size, index * size, width)
            self._operations.insert(place, (tapping, size))
        return width

    def with_given(self, places: Sequence[int], to: int, size: int) -> "ProgramBuilder":
        """A copy that also adds `size` given floats of the batch to a slot before each of these operations."""
        other = copy(self)
        other._operations = self._operations[:]
        for index, place in sorted(enumerate(places), key=lambda each: each[1], reverse=True):
            adding = structs.Adding(to, size, index * size, size * len(places))
            other._operations.insert(place, (adding, size))
        return other

    def adapt(self, adapters: NativeAdapters) -> None:
        """Let rows add something to the products that have sites."""
        self.adapters = adapters.address
        self._kept.append(adapters)

    @property
    def num_operations(self) -> int:
        """The number of operations so far."""
        return len(self._operations)

    def build(
        self, library: Library, head: PackedLinear | None, *, logit_scale: float = 1.0, logit_softcap: float = 0.0
    ) -> Program:
        """The program; with an output matrix, if there are logits."""
        if head is not None:
            self._follow(head)
        kinds = [structs.OPERATIONS.index(type(operation)) for operation, _ in self._operations]
        operations = (_Operation * len(kinds))(
            *(
                _Operation(ctypes.addressof(operation), kind, size)
                for kind, (operation, size) in zip(kinds, self._operations, strict=True)
            )
        )
        widths = (c_int32 * len(self._widths))(*self._widths)
        struct = ProgramStruct(
            *(ctypes.addressof(operations), ctypes.addressof(widths), LinearStruct() if head is None else head.struct),
            *(len(operations), len(widths), self._hidden_size, self._packed_width),
            *(logit_scale, logit_softcap, self.adapters),
        )
        return Program(library, struct, (self._operations, self._kept, operations, widths, head))

    def _follow(self, linear: PackedLinear) -> None:
        """Note the weights that are needed next: a core that waits for other ranks prefetches some of them."""
        if self._waiting is not None:
            self._waiting.ahead = linear.weight.data_ptr()
            self._waiting.ahead_bytes = min(linear.weight.nbytes, _MOST_AHEAD)
            self._waiting = None

    def _norm(self, norm: NormWeights | None) -> structs.NormWeightsStruct:
        return norm_struct(norm, self._kept)

    def append(self, operation: ctypes.Structure, size: int = 0, *kept: object) -> None:
        """Add an operation on `size` floats of each token, and keep alive what its pointers refer to."""
        self._operations.append((operation, size))
        self._kept += kept


def norm_struct(norm: NormWeights | None, kept: list[object]) -> structs.NormWeightsStruct:
    """A norm as a C struct; what its pointers refer to is added to `kept`."""
    if norm is None:
        return structs.NormWeightsStruct(kind=NORM_KINDS.index("none"))
    weight, bias = (None if vector is None else vector.float().contiguous() for vector in (norm.weight, norm.bias))
    kept += [weight, bias]
    return structs.NormWeightsStruct(address_of(weight), address_of(bias), norm.eps, NORM_KINDS.index(norm.kind))
