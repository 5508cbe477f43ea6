"""The format MXFP4: 4-bit floats (e2m1), two in a byte, the first in the lower half; scales are powers of two.

OCP Microscaling Formats (MX) Specification, version 1.0, 2023.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.models.formats.mxfp4 import BLOCK, MXFP4Matrix

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor((*_MAGNITUDES, *(-its for its in _MAGNITUDES)))
_EXPONENT_BIAS = 127


def decode(format: MXFP4Matrix, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """As `Decode`, for codes uint8[E, N, K / 32, 16] and scales uint8[E, N, K / 32]."""
    pairs = parts["codes"]
    # 2^-127 to 2^127 are exact in bf16, as in fp32.
    scales = torch.exp2(parts["scales"].float() - _EXPONENT_BIAS).bfloat16()
    return QuantizedWeight(
        codes=torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-3),
        bits=4,
        group=BLOCK,
        scales=scales,
        values=_VALUES,
    )
