"""Sets the logits of forbidden tokens to minus infinity, from one bit per token."""

import numpy as np
import torch
from torch import Tensor

_ROWS_AT_ONCE = 16
"""Each bit temporarily becomes an int32; this limits that memory to 64 bytes per token of the vocabulary."""


def mask_tokens(logits: Tensor, indices: Tensor, bits: Tensor) -> None:
    """Mask some rows of the logits in place; the other rows are not changed.

    Args:
        logits: [S, V], any float type, on any device.
        indices: int64 [C], the masked rows, each once.
        bits: int32 [C, ceil(V / 32)]; token t is allowed if bit t % 32 of word t // 32 is set.
    """
    num_words = -(-logits.shape[1] // 32)
    if bits.shape != (indices.shape[0], num_words) or bits.dtype != torch.int32:
        raise ValueError(f"bits {bits.dtype} {tuple(bits.shape)} do not fit logits {tuple(logits.shape)}")
    if logits.is_cuda:
        mask_tokens_gpu(logits, indices, bits)
    else:
        mask_tokens_cpu(logits, indices, bits)


def mask_tokens_gpu(logits: Tensor, indices: Tensor, bits: Tensor) -> None:
    """The same without reading any value on the host."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    for begin in range(0, indices.shape[0], _ROWS_AT_ONCE):
        index = indices[begin : begin + _ROWS_AT_ONCE]
        is_banned = (bits[begin : begin + _ROWS_AT_ONCE, :, None] >> shifts) & 1 == 0
        is_banned = is_banned.flatten(1)[:, : logits.shape[1]]
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(is_banned, -torch.inf))


def mask_tokens_cpu(logits: Tensor, indices: Tensor, bits: Tensor) -> None:
    """The same with two operations per row: rows are few, so the number of operations dominates the cost."""
    is_banned = np.unpackbits((~bits.numpy()).view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
    for row, banned in zip(indices.tolist(), torch.from_numpy(is_banned.view(np.bool_)), strict=True):
        logits[row].masked_fill_(banned, -torch.inf)


def mask_tokens_reference(logits: Tensor, indices: Tensor, bits: Tensor) -> Tensor:
    """Token by token in plain Python; does not change `logits` and returns masked ones."""
    masked = logits.clone()
    for row, words in zip(indices.tolist(), bits.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> (token % 32) & 1:
                masked[row, token] = -torch.inf
    return masked
