"""The format of GPTQ.

With j the group of input k,

    w[n, k] = scales[j, n] * (codes[k, n] - zeros[j, n])

Codes are packed along the inputs and zero points along the outputs, as streams of bits in 32-bit words. The first
version of the layout stores zero points minus one. It subtracted from whole words, so a zero point of 0 borrows from
the next one; adding to whole words restores all of them. With 3 bits, one was subtracted from each by itself, modulo 8.
"""

from collections.abc import Mapping

from torch import Tensor

from penstock.gpu_worker.formats.packing import equal_or_all, order_of_groups, unpacked
from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.models.formats.gptq import GPTQMatrix

_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a one in each code of a word


def decode(format: GPTQMatrix, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """As `Decode`."""
    bits, scales = format.bits, parts["scales"].t().contiguous()
    num_outputs = len(scales)
    words = parts["codes"].t()
    groups = parts.get("groups")
    num_inputs = len(groups) if groups is not None else words.shape[1] * 32 // bits
    group = format.group_size or num_inputs
    codes = unpacked(words, bits, num_inputs)
    order = None if groups is None else order_of_groups(groups, group)
    if order is not None:
        codes = codes.index_select(1, order)
    return QuantizedWeight(
        codes=codes,
        bits=bits,
        group=group,
        scales=scales,
        zeros=equal_or_all(_zeros(format, parts["zeros"], num_outputs)),
        order=order,
    )


def _zeros(format: GPTQMatrix, words: Tensor, num_outputs: int) -> Tensor:
    """uint8[N, J]."""
    if format.version == 1 and format.bits in _ONES:
        words = (words.long() + _ONES[format.bits]).int()
    zeros = unpacked(words, format.bits, num_outputs)
    if format.version == 1 and format.bits not in _ONES:
        zeros = (zeros + 1) & (2**format.bits - 1)
    return zeros.t().contiguous()
