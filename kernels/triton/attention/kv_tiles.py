"""Loads tiles of keys and values from pages of any format; `kernels/attention/kv_quantization.py` has the formats.

FORMAT is "" for pages of plain numbers, else the name of the format, or "fp8_e4m3_bits" on a GPU that cannot convert
fp8_e4m3. Codes are converted exactly on every GPU. If a token has one scale, keys and values are not multiplied by it.
Instead, scores and weights are, since they are fewer.
"""

import triton
import triton.language as tl

from penstock.kernels.attention.kv_quantization import GROUP, PageLayout
from penstock.kernels.triton.device import DeviceFacts, next_power_of_two

IN_GROUP: tl.constexpr = tl.constexpr(GROUP)


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
def in_order_of_tiles(x, FORMAT: tl.constexpr):
    """[M, BLOCK_D] of queries, with columns in the order of tiles.

    In tiles, the two numbers of an int4 byte are adjacent, so that unpacking moves no number to another thread. Scores
    do not depend on the order, as long as queries and keys have the same.
    """
    if FORMAT == "int4":
        groups = tl.reshape(x, [x.shape[0], x.shape[1] // IN_GROUP, 2, IN_GROUP // 2])
        x = tl.reshape(tl.permute(groups, (0, 1, 3, 2)), x.shape)
    return x


@triton.jit
def in_order_of_heads(x, FORMAT: tl.constexpr):
    """[M, BLOCK_D] of results: columns in the order of tiles are put into the order of heads."""
    if FORMAT == "int4":
        groups = tl.reshape(x, [x.shape[0], x.shape[1] // IN_GROUP, IN_GROUP // 2, 2])
        x = tl.reshape(tl.permute(groups, (0, 1, 3, 2)), x.shape)
    return x


@triton.jit
def halves(pairs):
    """The lower and the upper fp16 of each uint32."""
    low = pairs.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def from_integers(codes, ZERO: tl.constexpr):
    """uint8 codes minus ZERO, as fp32. Codes become the last bits of 2**23, since sums are faster than conversions."""
    return (codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def from_fp8(codes, EXPONENT: tl.constexpr, BIAS: tl.constexpr):
    """uint8 codes as fp32: moves the bits to their places in fp32, and adjusts the exponent. No code is infinite."""
    bits = (codes.to(tl.int32) << 24) >> (8 - EXPONENT)  # all copies of the sign bit but one are cleared
    MASK: tl.constexpr = (1 << 31) | (0x7F << (16 + EXPONENT))
    return (bits.to(tl.uint32, bitcast=True) & MASK).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))


@triton.jit
def from_bytes(codes, FORMAT: tl.constexpr):
    """The numbers for codes of one byte, in a type that holds all of them exactly."""
    if FORMAT == "int8":
        numbers = from_integers(codes ^ 0x80, 128)
    elif FORMAT == "fp8_e5m2":
        numbers = from_fp8(codes, 5, 15)
    elif FORMAT == "fp8_e4m3":
        numbers = codes.to(tl.float8e4nv, bitcast=True)
    else:
        numbers = from_fp8(codes, 4, 7)
    return numbers


@triton.jit
def from_int4(codes, pairs, BLOCK_D: tl.constexpr):
    """fp32[BLOCK_N, BLOCK_D]: minimum + scale * code, from pairs uint32[BLOCK_N, groups] of fp16: scale, minimum."""
    GROUPS: tl.constexpr = BLOCK_D // IN_GROUP
    numbers = from_integers(tl.reshape(tl.join(codes & 15, codes >> 4), [codes.shape[0], GROUPS, IN_GROUP]), 0)
    scales, minimums = halves(pairs)
    tile = minimums.to(tl.float32)[:, :, None] + scales.to(tl.float32)[:, :, None] * numbers
    return tl.reshape(tile, [codes.shape[0], BLOCK_D])


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
):
    """[BLOCK_N, BLOCK_D] of what pages hold for tokens. `places` are n_offs, unless some tokens are elsewhere.

    ONE_PAGE: the tile is inside one page, so one page id is enough. CHECK: tokens >= n_end are read as 0, because their
    slots may hold anything, even NaN, and 0 * NaN would reach the sum.
    """
    if ONE_PAGE:
        page = tl.load(page_row_ptr + n_first // PAGE_SIZE).to(tl.int64)
        in_page = n_first % PAGE_SIZE + (n_offs - n_first)
        ptrs = (base_ptr + page * stride_page) + in_page[:, None] * stride_token + d_offs[None, :]
    else:
        if CHECK:
            pages = tl.load(page_row_ptr + places // PAGE_SIZE, mask=n_offs < n_end, other=0).to(tl.int64)
        else:
            pages = tl.load(page_row_ptr + places // PAGE_SIZE).to(tl.int64)
        ptrs = base_ptr + (pages * stride_page + (places % PAGE_SIZE) * stride_token)[:, None] + d_offs[None, :]
    if CHECK:
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
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    CHECK: tl.constexpr,
    HAS_PATHS: tl.constexpr,
):
    """fp32[BLOCK_N]: one scale for each token. Arguments as in `load_tile`.

    Scales are loaded in pairs, because loads ahead of use need at least 32 bits.
    """
    if PAGE_SIZE == 1 or HAS_PATHS:
        column = load_tile(
            base_ptr.to(tl.pointer_type(tl.float16)), page_row_ptr, n_first, n_offs, places, n_end, tl.arange(0, 1),
            stride_page // 2, 1, 1, 1, PAGE_SIZE, ONE_PAGE, CHECK,
        )  # fmt: skip
        scales = tl.sum(column, 1)
    else:
        pair = n_first // 2
        pairs = pair + tl.arange(0, BLOCK_N // 2)
        column = load_tile(
            base_ptr.to(tl.pointer_type(tl.uint32)), page_row_ptr, pair, pairs, pairs,
            (n_end + 1) // 2, tl.arange(0, 1), stride_page // 4, 1, 1, 1, PAGE_SIZE // 2, ONE_PAGE, CHECK,
        )  # fmt: skip
        low, high = halves(tl.sum(column, 1))
        scales = tl.reshape(tl.join(low, high), [BLOCK_N])
        if CHECK:
            scales = tl.where(n_offs < n_end, scales, 0.0)
    return scales.to(tl.float32)


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
    HAS_PATHS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """(tile [BLOCK_N, BLOCK_D] of K or V in DTYPE, fp32 [BLOCK_N], the factors of its rows that are not applied yet).

    The latter is 1 if there are no such factors. Arguments as in `load_tile`.
    """
    scales = 1.0
    if FORMAT == "":
        tile = load_tile(
            base_ptr, page_row_ptr, n_first, n_offs, places, n_end, d_offs, stride_page, stride_token,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, ONE_PAGE, CHECK,
        )  # fmt: skip
    elif FORMAT == "int4":
        GROUPS: tl.constexpr = (HEAD_DIM + IN_GROUP - 1) // IN_GROUP
        BYTES: tl.constexpr = GROUPS * IN_GROUP // 2
        codes = load_tile(
            base_ptr, page_row_ptr, n_first, n_offs, places, n_end, tl.arange(0, BLOCK_D // 2), stride_page, BYTES,
            BYTES, BLOCK_D // 2, PAGE_SIZE, ONE_PAGE, CHECK,
        )  # fmt: skip
        pairs = load_tile(
            (base_ptr + PAGE_SIZE * BYTES).to(tl.pointer_type(tl.uint32)), page_row_ptr, n_first, n_offs, places, n_end,
            tl.arange(0, BLOCK_D // IN_GROUP), stride_page // 4, GROUPS,
            GROUPS, BLOCK_D // IN_GROUP, PAGE_SIZE, ONE_PAGE, CHECK,
        )  # fmt: skip
        tile = from_int4(codes, pairs, BLOCK_D)
    else:
        codes = load_tile(
            base_ptr, page_row_ptr, n_first, n_offs, places, n_end, d_offs, stride_page, HEAD_DIM,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, ONE_PAGE, CHECK,
        )  # fmt: skip
        tile = from_bytes(codes, FORMAT)
        scales = load_scales(
            base_ptr + PAGE_SIZE * HEAD_DIM, page_row_ptr, n_first, n_offs, places, n_end, stride_page,
            codes.shape[0], PAGE_SIZE, ONE_PAGE, CHECK, HAS_PATHS,
        )  # fmt: skip
    tile = tile.to(DTYPE)
    if FORMAT != "":
        # A sum over one number. It keeps the compiler from widening codes in the layout of the product's operands.
        # Before Hopper, each warp would then widen all codes for itself.
        tile = tl.sum(tl.reshape(tile, [tile.shape[0], BLOCK_D, 1]), 2)
    return tile, scales
