"""Quantizes heads of one position into pages, with the bits of `quantize` in `kernels/attention/kv_quantization.py`.

Numbers are rounded by integer operations and by sums instead of conversions, because GPUs differ in their conversions
and in how these round. FORMAT is the name of a format.
"""

import triton
import triton.language as tl

from penstock.kernels.attention.kv_quantization import GROUP, LEAST_FP8_SCALE

IN_GROUP: tl.constexpr = tl.constexpr(GROUP)
LEAST_FP8: tl.constexpr = tl.constexpr(LEAST_FP8_SCALE)
MOST: tl.constexpr = tl.constexpr(65504.0)  # the largest fp16
WHOLE: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: at this size, fp32 has only whole numbers


@triton.jit
def whole_heads(
    x1, x2, x3, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """[BLOCK_H, BLOCK_D] of heads from three parts: two of HALF numbers, and the rest. Padding is arbitrary."""
    heads = tl.reshape(tl.permute(tl.join(x1, x2), (0, 2, 1)), [x1.shape[0], 2 * BLOCK_HALF])
    if 2 * HALF != BLOCK_D or HALF != BLOCK_HALF:
        d_offs = tl.arange(0, BLOCK_D)
        at = tl.where(d_offs < HALF, d_offs, d_offs - HALF + BLOCK_HALF)
        heads = gathered(heads, at, 2 * BLOCK_HALF)
        if REST > 0:
            heads = tl.where((d_offs < 2 * HALF)[None, :], heads, gathered(x3, d_offs - 2 * HALF, x3.shape[1]))
    return heads


@triton.jit
def gathered(x, at, NUM: tl.constexpr):
    """x[:, at] of x [BLOCK_H, NUM]; an arbitrary column where `at` is out of range."""
    at = tl.maximum(tl.minimum(at, NUM - 1), 0)
    return tl.gather(x, tl.broadcast_to(at[None, :], [x.shape[0], at.shape[0]]), 1)


@triton.jit
def rounded(x):
    """The nearest whole numbers, ties to even; x must be below 2**22."""
    return (x + WHOLE) - WHOLE


@triton.jit
def divided(x, scales):
    """x / fp16 scales, rounded once; a scale of 0 counts as 1."""
    scales = scales.to(tl.float32)
    return tl.div_rn(x, tl.zeros_like(x) + tl.where(scales == 0.0, 1.0, scales))


@triton.jit
def to_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The nearest uint8 codes of fp32 numbers, ties to even; no number may exceed the largest code."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = bits >> 24 & 0x80
    size = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    near = size + (1 << (DROPPED - 1)) - 1 + (size >> DROPPED & 1)
    normal = (near >> DROPPED) - (127 - BIAS << MANTISSA)
    # Subnormals are multiples of the smallest one. When 2**23 times the smallest is added, the last bits of the fp32
    # are the multiple.
    OFFSET: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    subnormal = (size.to(tl.float32, bitcast=True) + OFFSET).to(tl.uint32, bitcast=True) & 0xFF
    is_normal = size >= (128 - BIAS << 23)
    return (sign | tl.where(is_normal, normal, subnormal)).to(tl.uint8)


@triton.jit
def store_heads(
    head_ptrs,
    position,
    x,
    is_head,
    static_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Quantize heads of one position and store codes and scales.

    Args:
        head_ptrs: uint8*[BLOCK_H], the page's bytes of each head.
        position: in the page.
        x: fp32[BLOCK_H, BLOCK_D].
        is_head: [BLOCK_H], whether there is such a head.
        static_scale: of the checkpoint, or None.
    """
    d_offs = tl.arange(0, BLOCK_D)
    inside = (d_offs < HEAD_DIM)[None, :]
    if FORMAT == "int4":
        GROUPS: tl.constexpr = (HEAD_DIM + IN_GROUP - 1) // IN_GROUP
        store_int4(head_ptrs, position, x, is_head, inside, GROUPS, BLOCK_D // IN_GROUP, PAGE_SIZE)
    else:
        LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0 if FORMAT == "fp8_e4m3" else 57344.0
        if static_scale is not None:
            scales = tl.zeros([x.shape[0]], tl.float32) + static_scale
        else:
            largest = tl.max(tl.where(inside, tl.abs(x), 0.0), 1)
            scales = tl.div_rn(largest, tl.full([x.shape[0]], LARGEST, tl.float32))
        if FORMAT != "int8":
            scales = tl.maximum(scales, LEAST_FP8)
        scales = tl.minimum(scales, MOST).to(tl.float16)
        codes = tl.minimum(tl.maximum(divided(x, scales[:, None]), -LARGEST), LARGEST)
        if FORMAT == "int8":
            codes = rounded(codes).to(tl.int8).to(tl.uint8, bitcast=True)
        elif FORMAT == "fp8_e4m3":
            codes = to_fp8(codes, 3, 7)
        else:
            codes = to_fp8(codes, 2, 15)
        tl.store(head_ptrs[:, None] + position * HEAD_DIM + d_offs[None, :], codes, mask=is_head[:, None] & inside)
        scales_ptrs = (head_ptrs + PAGE_SIZE * HEAD_DIM).to(tl.pointer_type(tl.float16))
        tl.store(scales_ptrs + position, scales, mask=is_head)


@triton.jit
def store_int4(
    head_ptrs, position, x, is_head, inside,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """The part of `store_heads` for int4: heads have GROUPS groups, each with a scale and a minimum."""
    BLOCK_H: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = IN_GROUP // 2
    minimums = tl.min(tl.reshape(tl.where(inside, x, float("inf")), [BLOCK_H, BLOCK_G, IN_GROUP]), 2)
    minimums = tl.minimum(tl.maximum(minimums, -MOST), MOST).to(tl.float16)
    above = tl.reshape(x, [BLOCK_H, BLOCK_G, IN_GROUP]) - minimums.to(tl.float32)[:, :, None]
    inside = tl.reshape(tl.broadcast_to(inside, x.shape), [BLOCK_H, BLOCK_G, IN_GROUP])
    largest = tl.max(tl.where(inside, above, float("-inf")), 2)
    scales = tl.div_rn(largest, tl.full([BLOCK_H, BLOCK_G], 15.0, tl.float32))
    scales = tl.minimum(tl.maximum(scales, 0.0), MOST).to(tl.float16)
    codes = rounded(tl.minimum(tl.maximum(divided(above, scales[:, :, None]), 0.0), 15.0))
    codes = tl.where(inside, codes, 0.0).to(tl.uint8)
    low, high = tl.split(tl.permute(tl.reshape(codes, [BLOCK_H, BLOCK_G, 2, HALF]), (0, 1, 3, 2)))
    g_offs = tl.arange(0, BLOCK_G)
    is_group = is_head[:, None] & (g_offs < GROUPS)[None, :]
    codes_ptrs = head_ptrs[:, None] + position * GROUPS * HALF + g_offs[None, :] * HALF
    i_offs = tl.arange(0, HALF)
    tl.store(codes_ptrs[:, :, None] + i_offs[None, None, :], low | high << 4, mask=is_group[:, :, None])
    pairs_ptrs = (head_ptrs + PAGE_SIZE * GROUPS * HALF).to(tl.pointer_type(tl.float16))
    pairs_ptrs = pairs_ptrs[:, None] + (position * GROUPS + g_offs[None, :]) * 2
    tl.store(pairs_ptrs, scales, mask=is_group)
    tl.store(pairs_ptrs + 1, minimums, mask=is_group)
