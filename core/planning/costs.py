"""What a described decoder reads and computes in a step, in exact counts."""

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from penstock.core.checkpoint.decoder import Attention, Decoder, DenseMLP, Experts
from penstock.core.checkpoint.model_config import KVShape
from penstock.core.checkpoint.weights import decoder_tensors
from penstock.core.planning.quantized_bytes import quantized_bytes

Chunk = tuple[int, int]
"""Of one sequence in a step: the first position that is computed, and how many are."""
Chunks = Mapping[Chunk, int]
"""A step: its different chunks, and how many sequences have each."""
BYTES = {"fp32": 4.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a number; of weights, formats of 4 bits also have scales, which are left out."""
_KV_GROUP, _KV_GROUP_BYTES, _KV_SCALE_BYTES = 32, 20, 2


class Costs(NamedTuple):
    """A decoder with weights and keys and values in these formats.

    Of one that is quantized, `weights` is the format that products are computed in; its bytes follow from its own.
    """

    decoder: Decoder
    weights: str = "fp16"  # one of BYTES
    kv: str = "fp16"

    @property
    def num_parameters(self) -> int:
        """Of the checkpoint, a tied output matrix once."""
        return _num_parameters(self.decoder)

    @property
    def num_active(self) -> int:
        """Weights of matrices that one token is multiplied with, the head's among them."""
        return self.decoder.num_step_weights

    @property
    def weight_bytes(self) -> float:
        """Of all weights."""
        if self.decoder.quantization is not None:
            return quantized_bytes(self.decoder).total
        return self.num_parameters * BYTES[self.weights]

    @property
    def kv_bytes_per_token(self) -> float:
        """Of a token that all layers keep."""
        return self.kv_bytes(1)

    def kv_bytes(self, context: int) -> float:
        """Of a sequence; layers with windows keep no more than these."""
        return sum(self.kv_bytes_of(shape) * min(context, shape.window or context) for shape in self.decoder.kv)

    @property
    def state_bytes(self) -> int:
        """Of a sequence of any length: what layers with a state keep of it."""
        return self.decoder.state_bytes

    def kv_bytes_of(self, shape: KVShape) -> float:
        """Of a position in a layer, with its scales as the worker keeps them."""
        return shape.num_heads * sum(kv_head_bytes(self.kv, dim) for dim in (shape.key_dim, shape.value_dim) if dim)

    def weight_bytes_read(self, num_tokens: int) -> float:
        """By a step of so many tokens: each matrix once, of the experts those that some token goes to.

        Tokens are taken to choose experts evenly and independently.
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
        """Of a step."""
        decoder = self.decoder
        head = decoder.vocab_size * decoder.hidden_size
        total = 2.0 * sum(chunks.values()) * head  # one position of each samples
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
    """Of a head's key, or its value: a scale for all of it, or in int4 a scale and a minimum for every 32 numbers."""
    if kv == "int4":
        return -(-head_dim // _KV_GROUP) * _KV_GROUP_BYTES
    return head_dim * BYTES[kv] + (_KV_SCALE_BYTES if BYTES[kv] == 1 else 0)


@cache
def _num_parameters(decoder: Decoder) -> int:
    return sum(math.prod(shape) for shape in decoder_tensors(decoder).values())


def positions_seen(first: int, count: int, window: int | None) -> float:
    """How many positions these see, each those up to its own, or the last `window` of them."""
    last = first + count
    if window is None or last <= window:
        return count * (first + 1 + last) / 2
    growing = max(0, window - first - 1)  # positions that see fewer than the window
    return growing * (first + 1 + window - 1) / 2 + (count - growing) * window


def widest(decoder: Decoder) -> int:
    """Numbers of the widest activation of a token."""
    mlps = [layer.mlp for layer in decoder.layers if layer.mlp is not None]
    inner = [2 * (mlp.size if isinstance(mlp, DenseMLP) else mlp.size * mlp.router.top_k) for mlp in mlps]
    inner += [layer.recurrent.width for layer in decoder.layers if layer.recurrent is not None]
    return max(decoder.hidden_size, *inner)
