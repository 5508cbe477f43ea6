"""Gumbel noise from Philox-4x32-10, by the convention of `penstock.kernels.sampling.philox`."""

import triton
import triton.language as tl


@triton.jit
def philox_words(seed, position, groups):
    """The four words (uint32, shape of `groups`) of key = seed, counter = (group, position, 0, 0)."""
    c0 = groups.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    zero = tl.zeros_like(c0)
    key = seed.to(tl.uint64)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    return tl.philox_impl(c0, c1, zero, zero, zero + k0, zero + k1, 10)


@triton.jit
def gumbel(words):
    """-log(-log(u)) of u = ((word >> 9) + 0.5) / 2**23, fp32."""
    u = ((words >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(u))


@triton.jit
def token_noise(seed, position, first_group, BLOCK: tl.constexpr):
    """Noise of the BLOCK token ids from 4 * first_group on, fp32 [BLOCK]."""
    groups = first_group + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = philox_words(seed, position, groups)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [..., i, j] is word 2 * i + j
    return gumbel(tl.reshape(words, [BLOCK]))
