"""Loads tiles of keys and values from pages of any format; `kernels/attention/kv_quantization.py` has the formats.

FORMAT is "" for pages of plain numbers, else the name of the format, or "fp8_e4m3_bits" on a GPU that cannot convert
fp8_e4m3. Where queries have two bytes, tiles are fp16: on every GPU a few instructions make four codes into fp16, which
is finer than bf16. Its range is smaller, so queries are brought into it, exactly, by `in_type_of_tiles`.
"""

import triton
import triton.language as tl

from penstock.kernels.attention.kv_quantization import GROUP, PageLayout
from penstock.kernels.triton.device import DeviceFacts, next_power_of_two

IN_GROUP: tl.constexpr = tl.constexpr(GROUP)

# PTX for four codes, a register of bytes. Results are registers of two fp16 each.
FROM_E4M3: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# Each code becomes the upper byte of an fp16. Its exponent has a bit less than that of fp16, and moves down by one.
FROM_E4M3_BITS: tl.constexpr = tl.constexpr("""{
    .reg .b32 low, high, sizes;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 sizes, low, 0x7F007F00;
    shr.u32 sizes, sizes, 1;
    lop3.b32 $0, low, 0x80008000, sizes, 0xEA;
    and.b32 sizes, high, 0x7F007F00;
    shr.u32 sizes, sizes, 1;
    lop3.b32 $1, high, 0x80008000, sizes, 0xEA;
}""")
# A code is the upper byte of an fp16.
FROM_E5M2: tl.constexpr = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x1404;
    prmt.b32 $1, $2, 0, 0x3424;
}""")
# 128 + code becomes the last bits of 1024, the fp16 0x6400; then 1152 is subtracted.
FROM_INT8: tl.constexpr = tl.constexpr("""{
    .reg .b32 codes, low, high, zero;
    xor.b32 codes, $2, 0x80808080;
    mov.b32 zero, 0xE480E480;
    prmt.b32 low, codes, 0x64646464, 0x4140;
    prmt.b32 high, codes, 0x64646464, 0x4342;
    add.rn.f16x2 $0, low, zero;
    add.rn.f16x2 $1, high, zero;
}""")
# Four bytes of two codes each: $0 and $1 have the lower codes, $2 and $3 the upper ones. Lower codes become the last
# bits of 1024, the fp16 0x6400. Upper ones have a place that is worth 1 in 64, the fp16 0x5400.
FROM_INT4: tl.constexpr = tl.constexpr("""{
    .reg .b32 first, second, low, high, zero, zero_of_high;
    mov.b32 zero, 0xE400E400;
    mov.b32 zero_of_high, 0xD400D400;
    prmt.b32 first, $4, 0, 0x4140;
    prmt.b32 second, $4, 0, 0x4342;
    lop3.b32 low, first, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 high, first, 0x00F000F0, 0x54005400, 0xEA;
    add.rn.f16x2 $0, low, zero;
    add.rn.f16x2 $2, high, zero_of_high;
    lop3.b32 low, second, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 high, second, 0x00F000F0, 0x54005400, 0xEA;
    add.rn.f16x2 $1, low, zero;
    add.rn.f16x2 $3, high, zero_of_high;
}""")


def format_of(layout: PageLayout | None, facts: DeviceFacts) -> str:
    """FORMAT of pages."""
    if layout is None:
        return ""
    name = layout.format.name
    return "fp8_e4m3_bits" if name == "fp8_e4m3" and facts.capability < (8, 9) else name


def block_of_head(head_dim: int, layout: PageLayout | None) -> int:
    """BLOCK_D: a power of two that holds a head, and whole groups if there are any."""
    return next_power_of_two(max(head_dim, GROUP) if layout and layout.format.has_groups else head_dim)


@triton.jit
def in_type_of_tiles(q, scale, FORMAT: tl.constexpr):
    """(queries [M, BLOCK_D] in the type of tiles, fp32[M], the scales of their scores).

    Tiles of quantized pages are fp16, or fp32 for queries of that type. A row of bf16 may exceed fp16, so it is divided
    by a power of two that brings its largest number to 2**14, and the scale of its scores is multiplied by it.
    """
    scales = tl.zeros([q.shape[0]], dtype=tl.float32) + scale
    if FORMAT != "" and q.dtype == tl.bfloat16:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        exponent = tl.maximum(largest.to(tl.uint32, bitcast=True) >> 23, 15)  # of the power of two below it, and 127
        inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
        q = (q.to(tl.float32) * inverse[:, None]).to(tl.float16)
        power = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        scales = tl.maximum(scales * power, 2.0**-100)  # not 0, because a masked score is infinite
    return q, scales


@triton.jit
def halves(pairs):
    """The lower and the upper fp16 of each uint32."""
    low = pairs.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def from_bytes(codes, FORMAT: tl.constexpr):
    """fp16 numbers for codes of one byte, all exact; those of "fp8_e4m3_bits" are 2**8 times too small."""
    if FORMAT == "int8":
        numbers = tl.inline_asm_elementwise(FROM_INT8, "=r,=r,r", [codes], tl.float16, True, 4)
    elif FORMAT == "fp8_e5m2":
        numbers = tl.inline_asm_elementwise(FROM_E5M2, "=r,=r,r", [codes], tl.float16, True, 4)
    elif FORMAT == "fp8_e4m3":
        numbers = tl.inline_asm_elementwise(FROM_E4M3, "=r,=r,r", [codes], tl.float16, True, 4)
    else:
        numbers = tl.inline_asm_elementwise(FROM_E4M3_BITS, "=r,=r,r", [codes], tl.float16, True, 4)
    return numbers


@triton.jit
def plus_product(c, a, b):
    """c + a * b; in fp16 two at a time, and rounded once."""
    if b.dtype == tl.float16:
        return tl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.float16, True, 2)
    return c + a * b


@triton.jit
def from_int4(codes, pairs, DTYPE: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_N, BLOCK_D] in DTYPE: minimum + scale * code, from pairs uint32[BLOCK_N, groups] of fp16: scale, minimum.

    In fp16, groups that reach beyond its range are shrunk, so that no number is infinite.
    """
    GROUPS: tl.constexpr = BLOCK_D // IN_GROUP
    codes = tl.reshape(codes, [codes.shape[0], GROUPS, IN_GROUP // 2])
    low, high = tl.inline_asm_elementwise(FROM_INT4, "=r,=r,=r,=r,r", [codes], (tl.float16, tl.float16), True, 4)
    scales, minimums = halves(pairs)
    if tl.float16 == DTYPE:
        most = (65440.0 - minimums.to(tl.float32)) * (1.0 / 15.0)
        scales = tl.minimum(scales.to(tl.float32), most).to(tl.float16)
    scales, minimums = scales.to(DTYPE)[:, :, None], minimums.to(DTYPE)[:, :, None]
    low, high = plus_product(minimums, scales, low.to(DTYPE)), plus_product(minimums, scales, high.to(DTYPE))
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), [codes.shape[0], BLOCK_D])


@triton.jit
def load_tile(
    base_ptr,
    page_row_ptr,
    n_first,
    n_offs,
    places,
    n_end,
    d_offs,
    stride_page,
    stride_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    CHECK: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D] of what pages hold for tokens. `places` are n_offs, unless some tokens are elsewhere.

    ONE_PAGE: the tile is inside one page, so one page id is enough. CHECK: there may be tokens >= n_end, which have no
    page, and are read from any. CLEAR: they are read as 0, because slots may hold anything, even NaN, and 0 * NaN would
    reach the sum.
    """
    if ONE_PAGE:
        page = tl.load(page_row_ptr + n_first // PAGE_SIZE).to(tl.int64)
        in_page = n_first % PAGE_SIZE + (n_offs - n_first)
        ptrs = (base_ptr + page * stride_page) + in_page[:, None] * stride_token + d_offs[None, :]
    else:
        places = places.to(tl.uint32)
        if CHECK:
            pages = tl.load(page_row_ptr + places // PAGE_SIZE, mask=n_offs < n_end, other=0).to(tl.int64)
        else:
            pages = tl.load(page_row_ptr + places // PAGE_SIZE).to(tl.int64)
        ptrs = base_ptr + (pages * stride_page + (places % PAGE_SIZE) * stride_token)[:, None] + d_offs[None, :]
    if CHECK and CLEAR:
        mask = (n_offs < n_end)[:, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (d_offs < HEAD_DIM)[None, :]
        tile = tl.load(ptrs, mask=mask, other=0)
    elif HEAD_DIM != BLOCK_D:
        tile = tl.load(ptrs, mask=(d_offs < HEAD_DIM)[None, :], other=0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def load_scales(
    base_ptr,
    page_row_ptr,
    n_first,
    n_offs,
    places,
    n_end,
    stride_page,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    CHECK: tl.constexpr,
):
    """fp16[BLOCK_N]: one scale for each token, arbitrary for tokens >= n_end. Arguments as in `load_tile`.

    Each is loaded with its neighbour, because loads ahead of use need at least 32 bits.
    """
    IS_PAIR: tl.constexpr = PAGE_SIZE > 1
    if ONE_PAGE:
        page = tl.load(page_row_ptr + n_first // PAGE_SIZE)
        in_page = n_first % PAGE_SIZE + (n_offs - n_first)
    else:
        places = places.to(tl.uint32)
        in_page = places % PAGE_SIZE
        if CHECK:
            page = tl.load(page_row_ptr + places // PAGE_SIZE, mask=n_offs < n_end, other=0)
        else:
            page = tl.load(page_row_ptr + places // PAGE_SIZE)
    ptrs = base_ptr + page.to(tl.int64) * stride_page
    ptrs = (ptrs + in_page // 2 * 4).to(tl.pointer_type(tl.uint32)) if IS_PAIR else ptrs.to(tl.pointer_type(tl.uint16))
    bits = tl.load(ptrs)
    if IS_PAIR:
        bits = bits >> (in_page % 2 * 16).to(tl.uint32)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def scaled(numbers, scales, FORMAT: tl.constexpr):
    """Numbers of bytes in fp16 or fp32, times their tokens' scales fp16[BLOCK_N].

    In fp16, tokens that reach beyond its range are shrunk, so that no number is infinite.
    """
    GAIN: tl.constexpr = 256.0 if FORMAT == "fp8_e4m3_bits" else 1.0
    if numbers.dtype == tl.float16:
        MOST: tl.constexpr = 515.0 if FORMAT == "int8" else 1.142 if FORMAT == "fp8_e5m2" else 146.0
        scales = (tl.minimum(scales.to(tl.float32), MOST) * GAIN).to(tl.float16)
        numbers = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [numbers, scales[:, None]], tl.float16, True, 2
        )
    else:
        numbers *= (scales.to(tl.float32) * GAIN)[:, None]
    return numbers


@triton.jit
def load_kv(
    base_ptr,
    page_row_ptr,
    n_first,
    n_offs,
    places,
    n_end,
    d_offs,
    stride_page,
    stride_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    CHECK: tl.constexpr,
    CLEAR: tl.constexpr,
    APPLY: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """(tile [BLOCK_N, BLOCK_D] of K or V in DTYPE, scales of its tokens). Arguments as in `load_tile`.

    APPLY: scales are applied to the tile. Otherwise formats of bytes leave them, fp32[BLOCK_N], to the caller.
    """
    scales = 1.0
    if FORMAT == "":
        tile = load_tile(
            base_ptr, page_row_ptr, n_first, n_offs, places, n_end, d_offs, stride_page, stride_token,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, ONE_PAGE, CHECK, CLEAR,
        )  # fmt: skip
    elif FORMAT == "int4":
        GROUPS: tl.constexpr = (HEAD_DIM + IN_GROUP - 1) // IN_GROUP
        BYTES: tl.constexpr = GROUPS * IN_GROUP // 2
        codes = load_tile(
            base_ptr, page_row_ptr, n_first, n_offs, places, n_end, tl.arange(0, BLOCK_D // 2), stride_page, BYTES,
            BYTES, BLOCK_D // 2, PAGE_SIZE, ONE_PAGE, CHECK, CLEAR,
        )  # fmt: skip
        pairs = load_tile(
            (base_ptr + PAGE_SIZE * BYTES).to(tl.pointer_type(tl.uint32)), page_row_ptr, n_first, n_offs, places, n_end,
            tl.arange(0, BLOCK_D // IN_GROUP), stride_page // 4, GROUPS,
            GROUPS, BLOCK_D // IN_GROUP, PAGE_SIZE, ONE_PAGE, CHECK, CLEAR,
        )  # fmt: skip
        tile = from_int4(codes, pairs, DTYPE, BLOCK_D)
    else:
        codes = load_tile(
            base_ptr, page_row_ptr, n_first, n_offs, places, n_end, d_offs, stride_page, HEAD_DIM,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, ONE_PAGE, CHECK, CLEAR and FORMAT != "int8",
        )  # fmt: skip
        tile = from_bytes(codes, FORMAT).to(DTYPE)
        scales = load_scales(
            base_ptr + PAGE_SIZE * HEAD_DIM, page_row_ptr, n_first, n_offs, places, n_end, stride_page,
            PAGE_SIZE, ONE_PAGE, CHECK,
        )  # fmt: skip
        if CHECK and CLEAR:
            scales = tl.where(n_offs < n_end, scales, 0.0)
        if APPLY:
            tile = scaled(tile, scales, FORMAT)
        else:
            scales = scales.to(tl.float32) * (256.0 if FORMAT == "fp8_e4m3_bits" else 1.0)
    if FORMAT != "":
        # A sum over one number. It keeps the compiler from widening codes in the layout of the product's operands.
        # Before Hopper, each warp would then widen all codes for itself.
        tile = tl.sum(tl.reshape(tile, [tile.shape[0], BLOCK_D, 1]), 2)
    return tile, scales
