"""Masked logits: against the plain reference, other rows untouched."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.sampling.token_masks import mask_tokens, mask_tokens_cpu, mask_tokens_gpu, mask_tokens_reference


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_masked", [0, 1, 3, 20])
@pytest.mark.parametrize("mask", [mask_tokens_cpu, mask_tokens_gpu])
def test_masks_equal_the_reference(
    vocab_size: int, dtype: torch.dtype, num_masked: int, mask: Callable[[Tensor, Tensor, Tensor], None]
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(40, vocab_size, generator=generator).to(dtype)
    indices = torch.randperm(40, generator=generator)[:num_masked]
    shape = (num_masked, -(-vocab_size // 32))
    bits = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).int()
    expected = mask_tokens_reference(logits, indices, bits)
    mask(logits, indices, bits)
    assert torch.equal(logits, expected)
    assert num_masked == 0 or vocab_size == 1 or bool((logits == -torch.inf).any())


def test_bits_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        mask_tokens(torch.zeros(2, 33), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32))
