"""How far a kernel may lie from its reference."""

import torch
from torch import Tensor

RELATIVE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_near(got: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Elementwise, about two units in the last place of the dtype times `factor`; NaN never passes."""
    bound = RELATIVE[got.dtype] * factor
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)
