"""Quantized weights behind the interfaces of `linear.py`.

Weights in a device layout are multiplied as they are. The others are packed for the native CPU kernels.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import structlog
import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.models.linear import PlainExperts, PlainLinear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.activation import Activation
from penstock.kernels.experts.experts import GroupedRows
from penstock.kernels.native.library import Library, PackedLinear
from penstock.kernels.native.quantized.layout import UnsupportedWeightError
from penstock.kernels.quantized.linear import DeviceWeight, grouped_quantized_linear, quantized_linear, rows
from penstock.kernels.quantized.weight import QuantizedWeight, dequantized

log = structlog.get_logger()


class DeviceLinear(NamedTuple):
    """See `Linear`. For Triton and torch kernels."""

    weight: DeviceWeight
    bias: Tensor | None = None

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        return quantized_linear(x, self.weight, self.bias)

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        return quantized_linear(x, self.weight, self.bias, activation=activation)

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        raise NotImplementedError("the weight is packed for another kernel")


class DeviceExperts(NamedTuple):
    """See `ExpertLinear`. For Triton and torch kernels."""

    weight: DeviceWeight  # [E, out, in]
    bias: Tensor | None = None  # [E, out]

    def of_tokens(self, x: Tensor, grouped: GroupedRows, step: ForwardInputs, scales: Tensor | None = None) -> Tensor:
        return grouped_quantized_linear(x, grouped, self.weight, self.bias, of_tokens=True, scales=scales)

    def of_activation(self, x: Tensor, activation: Activation, grouped: GroupedRows, step: ForwardInputs) -> Tensor:
        return grouped_quantized_linear(x, grouped, self.weight, self.bias, activation=activation)

    def pack(
        self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False
    ) -> tuple[PackedLinear, ...]:
        raise NotImplementedError("the weights are packed for another kernel")


class DeviceEmbedding(NamedTuple):
    """See `Embedding`. For Triton and torch kernels."""

    weight: DeviceWeight
    dtype: torch.dtype

    def __call__(self, step: ForwardInputs) -> Tensor:
        return rows(self.weight, step.input_ids, self.dtype)

    def head(self) -> DeviceLinear:
        return DeviceLinear(self.weight)

    def pack(self, library: Library) -> PackedLinear:
        raise NotImplementedError("the weight is packed for another kernel")


class QuantizedLinear:
    """See `Linear`. To be packed once for the native CPU kernels. Called before that, it is the reference for them."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        self._weight: QuantizedWeight | None = weight
        self._bias = bias

    @property
    def weight(self) -> QuantizedWeight:
        """The weight as it was read."""
        if self._weight is None:
            raise RuntimeError("the weight has been packed, and let go")
        return self._weight

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        return functional.linear(x, dequantized(self.weight).to(x.dtype), self._bias)

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        return self(activation(x), step)

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        weight, self._weight = self.weight, None  # so that loading does not keep a model in memory twice
        try:
            return library.pack_quantized(weight, self._bias, interleaved=interleaved, rounds_inputs=rounds_inputs)
        except UnsupportedWeightError as error:
            _tell_of_floats(str(error))
        plain = PlainLinear(dequantized(weight), self._bias)
        return plain.pack(library, interleaved=interleaved, rounds_inputs=rounds_inputs)


class QuantizedExperts:
    """See `ExpertLinear`. To be packed once for the native CPU kernels."""

    def __init__(self, weights: Sequence[QuantizedWeight], bias: Tensor | None = None) -> None:
        """
        Args:
            weights: [out, in] for each expert, all with the same shape and format.
            bias: [E, out] or None.
        """
        biases = [None] * len(weights) if bias is None else list(bias)
        self._bias = bias
        self._experts = [QuantizedLinear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def of_tokens(self, x: Tensor, grouped: GroupedRows, step: ForwardInputs, scales: Tensor | None = None) -> Tensor:
        return self._plain(x.dtype).of_tokens(x, grouped, step, scales)

    def of_activation(self, x: Tensor, activation: Activation, grouped: GroupedRows, step: ForwardInputs) -> Tensor:
        return self._plain(x.dtype).of_activation(x, activation, grouped, step)

    def pack(
        self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False
    ) -> tuple[PackedLinear, ...]:
        return tuple(
            expert.pack(library, interleaved=interleaved, rounds_inputs=rounds_inputs) for expert in self._experts
        )

    def _plain(self, dtype: torch.dtype) -> PlainExperts:
        numbers = [dequantized(expert.weight).to(dtype) for expert in self._experts]
        return PlainExperts(torch.stack(numbers), self._bias)


class QuantizedEmbedding:
    """See `Embedding`. To be packed once for the native CPU kernels, even if it is also the output matrix."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self._linear = QuantizedLinear(weight)

    def __call__(self, step: ForwardInputs) -> Tensor:
        return dequantized(self._linear.weight.of_outputs(step.input_ids.long()))

    def head(self) -> QuantizedLinear:
        return self._linear

    def pack(self, library: Library) -> PackedLinear:
        return self._linear.pack(library)


@cache
def _tell_of_floats(why: str) -> None:
    """Once for each reason."""
    log.warning("quantized weights dequantized in memory", why=why)
