"""Counter-based random numbers: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

The convention that all sampling paths share: the noise for token id t at position p of a sequence with
seed s is output word `t % 4` of Philox with

    key     = (s mod 2**32, s div 2**32)
    counter = (t div 4, p, 0, 0)

so a draw depends only on (seed, position, token id), and four neighbouring ids share one evaluation.
A word w becomes u = ((w >> 9) + 0.5) / 2**23, exact in fp32 and never 0 or 1, and -log(-log(u)) is Gumbel noise.
"""

import torch
from torch import Tensor

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def philox_words(seeds: Tensor, positions: Tensor, groups: Tensor) -> Tensor:
    """The four words of each counter, for token ids `4 * group` to `4 * group + 3`.

    Args:
        seeds: int64, any shape; all 64 bits are the key.
        positions: int64, broadcastable with it.
        groups: int64, broadcastable with it.

    Returns:
        int64 [..., 4], each word in [0, 2**32).
    """
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    # int64 products wrap modulo 2**64, so both 32-bit halves of a 32 x 32 product are correct.
    zeros = torch.zeros_like(seeds + positions + groups)
    c0, c1, c2, c3 = zeros + groups, zeros + positions, zeros, zeros
    for round_idx in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        high_0, low_0 = (product_0 >> 32).bitwise_and_(_LOW), product_0.bitwise_and_(_LOW)
        high_1, low_1 = (product_1 >> 32).bitwise_and_(_LOW), product_1.bitwise_and_(_LOW)
        key_0 = (k0 + round_idx * _WEYL_0).bitwise_and_(_LOW)
        key_1 = (k1 + round_idx * _WEYL_1).bitwise_and_(_LOW)
        c0, c1 = high_1.bitwise_xor_(c1).bitwise_xor_(key_0), low_1
        c2, c3 = high_0.bitwise_xor_(c3).bitwise_xor_(key_1), low_0
    return torch.stack((c0, c1, c2, c3), dim=-1)


def gumbel_from_words(words: Tensor) -> Tensor:
    """Words in [0, 2**32) -> standard Gumbel noise, fp32, same shape."""
    u = (words >> 9).float().add_(0.5).mul_(2.0**-23)
    return u.log_().neg_().log_().neg_()


def philox_reference(seed: int, position: int, token_id: int) -> int:
    """One word, in plain integers."""
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    c0, c1, c2, c3 = token_id // 4, position, 0, 0
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return (c0, c1, c2, c3)[token_id % 4]
