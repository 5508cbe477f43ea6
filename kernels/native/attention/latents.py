"""The Python side of latent attention (`latents.h`)."""

import ctypes
from ctypes import c_float, c_int32, c_void_p

from torch import Tensor

from penstock.kernels.native.library import Library, LinearStruct, address_of


class LatentStruct(ctypes.Structure):
    """As LatentAttention in latents.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("into", "out_of")),
        *((name, c_void_p) for name in ("norm_weight", "norm_bias")),
        *(("norm_eps", c_float), ("norm_kind", c_int32)),
        *((name, c_int32) for name in ("num_heads", "kv_rank", "nope_dim", "rope_dim", "v_dim", "page_size")),
        *(("scale", c_float), ("entry_dim", c_int32), ("top_k", c_int32)),
    )


class IndexerStruct(ctypes.Structure):
    """As Indexer in choice.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("norm_weight", "norm_bias")),
        *(("norm_eps", c_float), ("norm_kind", c_int32)),
        *((name, c_int32) for name in ("num_heads", "head_dim", "rope_dim", "top_k", "first", "entry_dim")),
        ("scale", c_float),
    )


class NativeIndexer:
    """A layer's indexer. `struct` points into this object."""

    def __init__(
        self, norm: Tensor, bias: Tensor, eps: float, *, num_heads: int, rope_dim: int, top_k: int, first: int
    ) -> None:
        """
        Args:
            norm: fp32 [head_dim], the weight of a LayerNorm of index keys.
            bias: fp32 [head_dim], of the norm.
            eps: of the norm.
            num_heads: of index queries.
            rope_dim: numbers of a head that are rotated, at its beginning.
            top_k: positions that a token chooses.
            first: numbers that the pages keep of a position before its index key.
        """
        self._alive = (norm, bias)
        self.struct = IndexerStruct(
            norm_weight=address_of(norm),
            norm_bias=address_of(bias),
            norm_eps=eps,
            norm_kind=2,  # kLayer in operations/norms.h
            num_heads=num_heads,
            head_dim=len(norm),
            rope_dim=rope_dim,
            top_k=top_k,
            first=first,
            entry_dim=first + len(norm),
            scale=(num_heads * len(norm)) ** -0.5,
        )


class PackedLatents:
    """A layer's weights between heads and latents, ready for the kernels. `struct` points into this object."""

    def __init__(
        self,
        library: Library,
        kv_b: Tensor,
        norm: Tensor,
        eps: float,
        *,
        num_heads: int,
        nope_dim: int,
        rope_dim: int,
        scale: float,
        page_size: int = 0,
        rounds_inputs: bool = False,
        index_dim: int = 0,
        top_k: int = 0,
    ) -> None:
        """
        Args:
            library: packs the weights.
            kv_b: [num_heads * (nope_dim + v_dim), kv_rank], fp32 or bf16: from a latent to each head's key, without its
                rotated part, and value.
            norm: fp32 [kv_rank], the weight of an RMSNorm of the latents.
            eps: of the norm.
            num_heads: of queries.
            nope_dim: numbers of a head's query or key that are not rotated.
            rope_dim: numbers that are rotated.
            scale: multiplies the scores.
            page_size: positions in a page; a program gets it from its pages.
            rounds_inputs: as for `Library.pack`.
            index_dim: numbers of the index key that the pages keep behind a latent and its key.
            top_k: positions that a token attends to, as the last indexer has chosen them; 0: all.
        """
        kv_rank = kv_b.shape[1]
        heads = kv_b.view(num_heads, -1, kv_rank)
        into, out_of = (
            [library.pack(weight.contiguous(), rounds_inputs=rounds_inputs) for weight in weights]
            for weights in (heads[:, :nope_dim].transpose(1, 2), heads[:, nope_dim:])
        )
        self._layers = [(LinearStruct * num_heads)(*(layer.struct for layer in layers)) for layers in (into, out_of)]
        self._alive = (into, out_of, norm)
        self.struct = LatentStruct(
            *(ctypes.addressof(layers) for layers in self._layers),
            norm_weight=address_of(norm),
            norm_eps=eps,
            norm_kind=1,  # kRms in operations/norms.h
            num_heads=num_heads,
            kv_rank=kv_rank,
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            v_dim=heads.shape[1] - nope_dim,
            page_size=page_size,
            scale=scale,
            entry_dim=kv_rank + rope_dim + index_dim,
            top_k=top_k,
        )
