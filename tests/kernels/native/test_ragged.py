"""Attention without a direction and activations by the native kernels, as encoders call them."""

from typing import get_args

import numpy as np
import pytest
import torch

from penstock.kernels.activation import (
    Activation,
    ActivationKind,
    activation_reference,
    gated_activation_reference,
)
from penstock.kernels.attention.ragged_attention import RaggedRows, ragged_attention_reference
from penstock.kernels.native.attention.ragged import NativeRows, activate
from penstock.kernels.native.library import Library
from tests.kernels.native.native_library import load_library


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(request.param)


def rows_of(lens: list[int]) -> RaggedRows:
    return RaggedRows(np.array(lens), torch.tensor(np.concatenate(([0], np.cumsum(lens))), dtype=torch.int32))


@pytest.mark.parametrize(("lens", "heads", "head_dim", "reach"), [
    ([1], 1, 16, None), ([5, 1, 64, 3], 2, 32, None), ([130, 7, 65], 3, 24, None), ([130, 7, 64, 90], 2, 32, 6),
    ([200, 3], 1, 64, 64), ([70, 70], 1, 80, 1),
])  # fmt: skip
def test_ragged_attention(library: Library, lens: list[int], heads: int, head_dim: int, reach: int | None) -> None:
    torch.manual_seed(0)
    qkv, rows = torch.randn(sum(lens), 3, heads, head_dim), rows_of(lens)
    got = NativeRows(rows).attend(library, qkv, head_dim**-0.5, reach)
    torch.testing.assert_close(got, ragged_attention_reference(qkv, rows, head_dim**-0.5, reach), atol=2e-6, rtol=2e-5)
    last = qkv[-lens[-1] :]
    alone = NativeRows(rows_of(lens[-1:])).attend(library, last, head_dim**-0.5, reach)
    assert torch.equal(alone, got[-lens[-1] :])


@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_activations(library: Library, kind: ActivationKind) -> None:
    x = 4 * torch.randn(37, 128)[:, :96]
    gated = activate(library, x, Activation(kind))
    torch.testing.assert_close(gated, gated_activation_reference(x, kind), atol=2e-6, rtol=2e-5)
    if kind != "clamped_swiglu":
        alone = activate(library, x, Activation(kind, is_gated=False))
        torch.testing.assert_close(alone, activation_reference(x, kind), atol=2e-6, rtol=2e-5)
    with pytest.raises(ValueError, match="widths of 16"):
        activate(library, x[:, :60], Activation(kind))
