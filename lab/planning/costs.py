"""Exact counts of what a described decoder reads and computes in a step."""

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from penstock.lab.planning.quantized_bytes import quantized_bytes
from penstock.models.description.decoder import Attention, Decoder, DenseMLP, Experts, positions_seen
from penstock.models.description.model_config import KVShape
from penstock.models.weights.decoder import decoder_tensors

Chunk = tuple[int, int]
"""A sequence's part of a step: its first computed position, and how many positions are computed."""
Chunks = Mapping[Chunk, int]
"""A step: its distinct chunks, and how many sequences have each."""
BYTES = {"fp32": 4.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes per number. Weights in 4 bits also have scales, which are left out."""
_KV_GROUP, _KV_GROUP_BYTES, _KV_SCALE_BYTES = 32, 20, 2


class Costs(NamedTuple):
    """A decoder, with the formats of its weights and of its keys and values.

    For a quantized decoder, `weights` is the format in which products are computed; its bytes follow from its own.
    """

    decoder: Decoder
    weights: str = "fp16"  # one of BYTES
    kv: str = "fp16"

    @property
    def num_parameters(self) -> int:
        """Parameters of the checkpoint; a tied output matrix counts once."""
        return _num_parameters(self.decoder)

    @property
    def num_active(self) -> int:
        """Weights of the matrices that one token is multiplied with, including the head."""
        return self.decoder.num_step_weights

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        if self.decoder.quantization is not None:
            return quantized_bytes(self.decoder).total
        return self.num_parameters * BYTES[self.weights]

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes of a token while all layers keep it."""
        return self.kv_bytes(1)

    def kv_bytes(self, context: int) -> float:
        """KV bytes of a sequence; layers with a window keep no more than the window."""
        return sum(self.kv_bytes_of(shape) * min(context, shape.window or context) for shape in self.decoder.kv)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states, whatever its length."""
        return self.decoder.state_bytes

    def kv_bytes_of(self, shape: KVShape) -> float:
        """KV bytes of a position in a layer, with its scales as the worker keeps them."""
        return shape.num_heads * sum(kv_head_bytes(self.kv, dim) for dim in (shape.key_dim, shape.value_dim) if dim)

    def weight_bytes_read(self, num_tokens: int) -> float:
        """Bytes of weights read by a step: each matrix once, and only the experts that some token goes to.

        Tokens are assumed to choose experts evenly and independently.
        """
        per_hidden = float(self.decoder.vocab_size)
        for layer in self.decoder.layers:
            per_hidden += sum(part.width for part in (layer.mixer, layer.mlp) if part is not None)
            if isinstance(layer.mlp, Experts):
                count, top_k = layer.mlp.count, layer.mlp.router.top_k
                used = count * (1 - (1 - top_k / count) ** num_tokens)
                per_hidden += layer.mlp.width_of_each * (used - top_k)
        quantized = self.decoder.quantization is not None
        each = quantized_bytes(self.decoder).of_product_weight if quantized else BYTES[self.weights]
        return per_hidden * self.decoder.hidden_size * each

    def operations(self, chunks: Chunks) -> float:
        """Operations of a step."""
        decoder = self.decoder
        head = decoder.vocab_size * decoder.hidden_size
        total = 2.0 * sum(chunks.values()) * head  # one position per sequence samples
        for (first, count), times in chunks.items():
            total += 2.0 * times * count * (self.num_active - head)
            for _, mixer in decoder.attentions:
                if isinstance(mixer, Attention):
                    each, window = 2 * mixer.head_dim, mixer.window
                else:
                    each, window = 2 * mixer.kv_rank + mixer.rope_dim, None
                total += 2.0 * times * mixer.num_heads * each * positions_seen(first, count, window)
        return total


def kv_head_bytes(kv: str, head_dim: int) -> float:
    """Bytes of a head's key or value, with one scale, or in int4 with a scale and a minimum for every 32 numbers."""
    if kv == "int4":
        return -(-head_dim // _KV_GROUP) * _KV_GROUP_BYTES
    return head_dim * BYTES[kv] + (_KV_SCALE_BYTES if BYTES[kv] == 1 else 0)


@cache
def _num_parameters(decoder: Decoder) -> int:
    return sum(math.prod(shape) for shape in decoder_tensors(decoder).values())


def widest(decoder: Decoder) -> int:
    """Size of a token's widest activation."""
    mlps = [layer.mlp for layer in decoder.layers if layer.mlp is not None]
    inner = [2 * (mlp.size if isinstance(mlp, DenseMLP) else mlp.size * mlp.router.top_k) for mlp in mlps]
    inner += [layer.recurrent.width for layer in decoder.layers if layer.recurrent is not None]
    return max(decoder.hidden_size, *inner)
