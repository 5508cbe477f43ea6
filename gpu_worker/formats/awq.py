"""AWQ's layout "gemm".

With j = k // group,

    w[n, k] = scales[j, n] * (codes[k, n] - zeros[j, n])

Eight outputs share a 32-bit word, first the even ones, then the odd ones.
"""

from collections.abc import Mapping

from torch import Tensor

from penstock.gpu_worker.formats.packing import equal_or_all, octets_of
from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.models.formats.awq import AWQMatrix

_BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # places of outputs 0 to 7 in a word


def decode(format: AWQMatrix, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """As `Decode`."""
    scales = parts["scales"].t().contiguous()
    return QuantizedWeight(
        codes=_by_output(parts["codes"]),
        bits=_BITS,
        group=format.group_size or len(parts["codes"]),
        scales=scales,
        zeros=equal_or_all(_by_output(parts["zeros"])),
    )


def _by_output(words: Tensor) -> Tensor:
    """int32[M, N / 8] -> uint8[N, M]."""
    octets = octets_of(words.t())
    codes = octets.new_empty(words.shape[1], 8, len(words))
    for output, place in enumerate(_PLACES):
        octet = octets[..., place // 2]
        codes[:, output] = octet >> 4 if place % 2 else octet & 15
    return codes.flatten(0, 1)
