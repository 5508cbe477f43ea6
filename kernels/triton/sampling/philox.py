"""Gumbel noise from Philox-4x32-10, by the convention of `penstock.kernels.sampling.philox`."""

import triton
import triton.language as tl


@triton.jit
def philox_words(seed, position, groups):
    """The four words (uint32, shape of `groups`) of key = seed, counter = (group, position, 0, 0)."""
    key = seed.to(tl.uint64)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    c0 = groups.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    for round_idx in tl.static_range(10):
        # One instruction makes both halves of a 64-bit product; Triton's own Philox asks for them separately.
        product_0 = c0.to(tl.uint64) * 0xD2511F53
        product_2 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product_2 >> 32).to(tl.uint32) ^ c1 ^ (k0 + (round_idx * 0x9E3779B9 & 0xFFFFFFFF))
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ (k1 + (round_idx * 0xBB67AE85 & 0xFFFFFFFF))
        c1 = product_2.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def uniform(words):
    """u = ((word >> 9) + 0.5) / 2**23, fp32 and exact: the bits become the mantissa of a number in [1, 2)."""
    return ((words >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375


@triton.jit
def gumbel(words):
    """-log(-log(u)), fp32."""
    return -tl.log(-tl.log(uniform(words)))


@triton.jit
def rough_exponential(words):
    """-log(u) within a factor of 1 +- 4.4e-4, with a cubic polynomial in place of a logarithm of full precision.

    The mantissa is taken from [0.75, 1.5), so the exponent is 0 near u = 1, where the logarithm vanishes.
    """
    bits = uniform(words).to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F400000) & -0x800000  # times 2**23
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    log_f = f * (0.99993421 + f * (-0.50398304 + f * (0.34314532 - 0.18437941 * f)))
    return -(log_f + exponent.to(tl.float32) * 8.262958294867817e-08)  # log(2) / 2**23


@triton.jit
def token_words(seed, position, first_group, BLOCK: tl.constexpr):
    """The words (uint32 [BLOCK]) of the token ids from 4 * first_group on."""
    groups = first_group + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = philox_words(seed, position, groups)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])  # [..., i, j] is word 2 * i + j


@triton.jit
def word_of(seed, position, ids):
    """The word (uint32, shape of `ids`) of each token id."""
    w0, w1, w2, w3 = philox_words(seed, position, ids // 4)
    of_pair = ids & 1
    return tl.where((ids & 2) == 0, tl.where(of_pair == 0, w0, w1), tl.where(of_pair == 0, w2, w3))
