"""Bytes of a model's matrices, from config.json alone: each format says what it stores for a shape."""

import math
from collections.abc import Mapping
from functools import cache

from penstock.models.description.decoder import Decoder
from penstock.models.formats.made import Recipe
from penstock.models.gguf.block_types import BLOCK_TYPES
from penstock.models.quantization import recipes_of
from penstock.models.weights.decoder import decoder_products

FLOAT_BYTES = 2
"""Most checkpoints use bf16, also for scales."""

_OF_DTYPE: dict[str, float] = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "I16": 2}
_OF_DTYPE |= {name: its.num_bytes / its.num_elements for name, its in BLOCK_TYPES.items()}
_NARROW = ("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL")


@cache
def product_bytes(decoder: Decoder) -> Mapping[str, float]:
    """Return the bytes of each matrix that activations are multiplied with, quantized or not."""
    products, recipes = decoder_products(decoder), recipes_of(decoder)
    sizes = {name: math.prod(product.shape) * float(FLOAT_BYTES) for name, product in products.items()}
    for name, product in products.items():
        # An embedding that is also the head is quantized like a head.
        is_tied = product.is_head and decoder.tied_embeddings
        stored_as = f"{decoder.names.head}.weight" if is_tied else name
        if name in recipes:
            sizes[name] = _made(recipes[name], product.shape)
        elif (found := _stored(decoder, stored_as, product.shape)) is not None:
            sizes[name] = found
    return sizes


def _made(recipe: Recipe, shape: tuple[int, ...]) -> float:
    num_weights, num_inputs = math.prod(shape), shape[-1]
    if recipe.format == "int4":
        num_groups = num_weights / num_inputs * -(-num_inputs // recipe.group)
        return num_weights / 2 + num_groups * (FLOAT_BYTES + recipe.has_zeros)
    return num_weights + num_weights / num_inputs * FLOAT_BYTES


def _stored(decoder: Decoder, name: str, shape: tuple[int, ...]) -> float | None:
    format = None if decoder.quantization is None else decoder.quantization.format_of(name)
    if format is None:
        return None
    parts = [part for part in format.parts(name, shape).values() if part.shape is not None and not part.is_optional]
    return sum(math.prod(part.shape or ()) * _bytes_of(part.dtypes) for part in parts)


def _bytes_of(dtypes: tuple[str, ...]) -> float:
    """Return the bytes of an element. If several types are allowed, floats count as 16 bits."""
    if dtypes[0] in _NARROW:
        return 1
    return _OF_DTYPE.get(dtypes[0], FLOAT_BYTES) if len(dtypes) == 1 else FLOAT_BYTES
