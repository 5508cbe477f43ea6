"""Attention without a direction over ragged rows: Triton's kernel and torch's path against the formula."""

import numpy as np
import pytest
import torch

from penstock.kernels.attention.ragged_attention import (
    RaggedRows,
    ragged_attention,
    ragged_attention_cpu,
    ragged_attention_reference,
)
from penstock.kernels.triton.attention.ragged_attention import ragged_attention_triton
from tests.kernels.tolerances import assert_near


def rows_of(lens: list[int], device: str) -> RaggedRows:
    starts = torch.tensor(np.concatenate(([0], np.cumsum(lens))), dtype=torch.int32, device=device)
    return RaggedRows(np.array(lens), starts)


@pytest.mark.parametrize(("lens", "heads", "head_dim", "reach"), [
    ([1], 1, 16, None), ([5, 1, 64, 3], 2, 32, None), ([130, 7, 65], 2, 24, None), ([130, 7, 64, 90], 2, 32, 6),
    ([200, 3], 1, 16, 64), ([70, 70], 1, 64, 1),
])  # fmt: skip
def test_ragged_attention(
    device: str, dtype: torch.dtype, lens: list[int], heads: int, head_dim: int, reach: int | None
) -> None:
    qkv = torch.randn(sum(lens), 3, heads, head_dim, device=device).to(dtype)
    rows = rows_of(lens, device)
    expected = ragged_attention_reference(qkv, rows, head_dim**-0.5, reach)
    assert_near(ragged_attention_triton(qkv, rows, head_dim**-0.5, reach), expected)
    if device == "cpu":
        assert_near(ragged_attention_cpu(qkv, rows, head_dim**-0.5, reach), expected)


def test_what_does_not_fit() -> None:
    qkv = torch.randn(5, 3, 1, 16)
    with pytest.raises(ValueError, match="4 tokens"):
        ragged_attention(qkv, rows_of([3, 1], "cpu"), 1.0)
