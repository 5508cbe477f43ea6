"""Turns the tensors of each format into a matrix that kernels know."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from penstock.gpu_worker.formats import awq, bitsandbytes, compressed_tensors, fp8, gguf_blocks, gptq, mxfp4
from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.models.formats.awq import AWQMatrix
from penstock.models.formats.bitsandbytes import BlocksMatrix, Int8Matrix
from penstock.models.formats.compressed_tensors import Floats, Integers, Packed
from penstock.models.formats.format import MatrixFormat
from penstock.models.formats.fp8 import FP8Matrix
from penstock.models.formats.gguf import GGUFBlocks
from penstock.models.formats.gptq import GPTQMatrix
from penstock.models.formats.mxfp4 import MXFP4Matrix


class Decode(Protocol):
    def __call__(self, format: Any, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """Make a matrix [N, K]; for experts in one tensor, [E, N, K].

        Args:
            format: an object of the class for which the function is registered.
            parts: the stored tensors, by their roles in `MatrixFormat.parts`; they may be views of the file.
        """


_DECODERS: dict[type[MatrixFormat], Decode] = {
    AWQMatrix: awq.decode,
    BlocksMatrix: bitsandbytes.decode_blocks,
    FP8Matrix: fp8.decode,
    GGUFBlocks: gguf_blocks.decode,
    Floats: compressed_tensors.decode_floats,
    GPTQMatrix: gptq.decode,
    Int8Matrix: bitsandbytes.decode_int8,
    Integers: compressed_tensors.decode_integers,
    MXFP4Matrix: mxfp4.decode,
    Packed: compressed_tensors.decode_packed,
}


def decode(format: MatrixFormat, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """The matrix that is stored in these parts."""
    return _DECODERS[type(format)](format, parts)
