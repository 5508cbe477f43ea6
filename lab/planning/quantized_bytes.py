"""Bytes of a model whose matrices are quantized, from config.json alone."""

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from penstock.models.description.decoder import Decoder
from penstock.models.product_bytes import FLOAT_BYTES, product_bytes
from penstock.models.weights.decoder import decoder_products, decoder_tensors


class QuantizedBytes(NamedTuple):
    """Bytes of a quantized model's tensors."""

    of_tensors: Mapping[str, float]
    of_product_weight: float  # on average over the matrices that activations are multiplied with

    @property
    def total(self) -> float:
        """Bytes of all tensors."""
        return sum(self.of_tensors.values())


@cache
def quantized_bytes(decoder: Decoder) -> QuantizedBytes:
    """Count the bytes. The model's configuration says how it is quantized, at load or before."""
    of_products = product_bytes(decoder)
    sizes = {name: math.prod(shape) * float(FLOAT_BYTES) for name, shape in decoder_tensors(decoder).items()}
    num_weights = sum(math.prod(product.shape) for product in decoder_products(decoder).values())
    return QuantizedBytes({**sizes, **of_products}, sum(of_products.values()) / num_weights)
