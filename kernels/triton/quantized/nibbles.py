"""Codes of 4 bits, and a few more, as numbers in half precision, in pairs as GPUs multiply them.

A word of 32 bits has eight codes (`penstock.kernels.quantized.device_weight`): those of inputs 2 * j and 2 * j + 1 are
j nibbles above the lowest one of each half. So one instruction takes out both, and gives them an exponent with which
they are 128 + c in bf16, or 1024 + c in fp16. The next one subtracts that and the zero, exactly. If few inputs share a
scale, each code becomes 128 + c in fp32 instead, is multiplied and added to, and rounded to half precision once.

Triton's language has no halves of words, and its interpreter no assembly, so it computes the same part by part.
"""

import triton
import triton.language as tl
from triton import knobs

from penstock.kernels.quantized.device_weight import NIBBLES

_OUTPUTS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r")
_OUTPUTS_OF_SCALED = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r")
_EIGHT = tl.constexpr((tl.int16,) * 8)


def _integers(kind: str, exponents: str, one: str) -> str:
    """Pairs of c - zero; $8 is the word, and $9 a pair of -(exponent's value + zero)."""
    each = "".join(
        f"""
    shr.b32 pair, $8, {4 * j};
    lop3.b32 pair, pair, mask, exponents, 0xEA;
    fma.rn.{kind} pair, pair, one, $9;
    mov.b32 {{${2 * j}, ${2 * j + 1}}}, pair;"""
        for j in range(4)
    )
    return f"""{{
    .reg .b32 pair, mask, exponents, one;
    mov.b32 mask, 0x000F000F;
    mov.b32 exponents, {exponents};
    mov.b32 one, {one};{each}
}}"""


def _scaled(kind: str, high_bits: int) -> str:
    """Pairs of (128 + c) * scale + summand: $8 is the word, $9 the high bits of its codes, $10 and $11 are fp32."""

    def shifted(place: int, of: str, to: int) -> str:
        return f"{'shl' if to >= place else 'shr'}.b32 bits, {of}, {abs(to - place)};"

    def one(k: int, name: str) -> str:
        low = f"""
    {shifted(4 * NIBBLES.index(k), "$8", 16)}
    lop3.b32 bits, bits, mask, exponent, 0xEA;"""
        high = f"""
    mov.b32 code, bits;
    {shifted(high_bits * k, "$9", 20)}
    lop3.b32 bits, bits, high_mask, code, 0xEA;"""
        return f"""{low}{high if high_bits else ""}
    fma.rn.f32 {name}, bits, $10, $11;"""

    pairs = "".join(
        f"""{one(2 * j, "first")}{one(2 * j + 1, "second")}
    cvt.rn.{kind}.f32 bits, second, first;
    mov.b32 {{${2 * j}, ${2 * j + 1}}}, bits;"""
        for j in range(4)
    )
    return f"""{{
    .reg .b32 bits, code, mask, high_mask, exponent;
    .reg .f32 first, second;
    mov.b32 mask, 0x000F0000;
    mov.b32 high_mask, {(2**high_bits - 1) << 20};
    mov.b32 exponent, 0x43000000;{pairs}
}}"""


def _e2m1() -> str:
    """Pairs in bf16; $9 is a pair of scales times 2**126. The bits of a code are those of a number so much smaller."""
    each = "".join(
        f"""
    shl.b32 sign, $8, {12 - 4 * j};
    and.b32 sign, sign, signs;
    {"shl" if j < 2 else "shr"}.b32 pair, $8, {abs(6 - 4 * j)};
    lop3.b32 pair, pair, sizes, sign, 0xEA;
    fma.rn.bf16x2 pair, pair, $9, signs;
    mov.b32 {{${2 * j}, ${2 * j + 1}}}, pair;"""
        for j in range(4)
    )
    return f"""{{
    .reg .b32 pair, sign, signs, sizes;
    mov.b32 signs, 0x80008000;
    mov.b32 sizes, 0x01C001C0;{each}
}}"""


def _table() -> str:
    """Values of 16 bits; $8 is the word, $9 to $12 are the upper bytes of values, and $13 to $16 the lower ones.

    The permutation of bytes looks up four codes of three bits at once. The fourth bit chooses between two of them.
    """

    def half(name: str, shift: int) -> str:
        lookups = "".join(
            f"""
    prmt.b32 one, ${at}, ${at + 1}, codes;
    prmt.b32 two, ${at + 2}, ${at + 3}, codes;
    lop3.b32 {bytes_}_{name}, one, two, chosen, 0xD8;"""
            for bytes_, at in (("upper", 9), ("lower", 13))
        )
        return f"""
    shr.b32 codes, $8, {shift};
    shr.b32 chosen, codes, 1;
    and.b32 codes, codes, 0x7777;
    and.b32 chosen, chosen, 0x4444;
    prmt.b32 chosen, 0, 0xFFFFFFFF, chosen;{lookups}"""

    pairs = "".join(
        f"""
    prmt.b32 one, lower_even, lower_odd, {selector};
    prmt.b32 two, upper_even, upper_odd, {selector};
    prmt.b32 codes, one, two, 0x5140;
    prmt.b32 chosen, one, two, 0x7362;
    mov.b32 {{${k}, ${k + 1}}}, codes;
    mov.b32 {{${k + 2}, ${k + 3}}}, chosen;"""
        for k, selector in ((0, "0x5140"), (4, "0x7362"))
    )
    return f"""{{
    .reg .b32 codes, chosen, one, two, upper_even, upper_odd, lower_even, lower_odd;{half("even", 0)}{half("odd", 16)}
    {pairs}
}}"""


def _bytes_of_bf16() -> str:
    """Pairs of signed bytes: 128 + the lowest seven bits, minus 128 or, with the sign, 256."""
    pairs = "".join(
        f"""
    prmt.b32 pair, $4, 0, {0x4140 + 0x202 * j};
    lop3.b32 low, pair, low_mask, exponents, 0xEA;
    lop3.b32 sign, pair, sign_mask, exponents, 0xEA;
    fma.rn.bf16x2 pair, sign, minus_one, low;
    mov.b32 {{${2 * j}, ${2 * j + 1}}}, pair;"""
        for j in range(2)
    )
    return f"""{{
    .reg .b32 pair, low, sign, low_mask, sign_mask, exponents, minus_one;
    mov.b32 low_mask, 0x007F007F;
    mov.b32 sign_mask, 0x00800080;
    mov.b32 exponents, 0x43004300;
    mov.b32 minus_one, 0xBF80BF80;{pairs}
}}"""


def _bytes_of_fp16() -> str:
    """Pairs of signed bytes: 1024 + the byte + 128, minus 1152."""
    pairs = "".join(
        f"""
    prmt.b32 pair, flipped, exponents, {0x4140 + 0x202 * j};
    fma.rn.f16x2 pair, pair, one, less;
    mov.b32 {{${2 * j}, ${2 * j + 1}}}, pair;"""
        for j in range(2)
    )
    return f"""{{
    .reg .b32 pair, flipped, exponents, one, less;
    xor.b32 flipped, $4, 0x80808080;
    mov.b32 exponents, 0x64646464;
    mov.b32 one, 0x3C003C00;
    mov.b32 less, 0xE480E480;{pairs}
}}"""


_OF_BF16 = tl.constexpr(_integers("bf16x2", "0x43004300", "0x3F803F80"))
_OF_FP16 = tl.constexpr(_integers("f16x2", "0x64006400", "0x3C003C00"))
_SCALED_BF16 = tl.constexpr(tuple(_scaled("bf16x2", high_bits) for high_bits in range(3)))
_SCALED_FP16 = tl.constexpr(tuple(_scaled("f16x2", high_bits) for high_bits in range(3)))
_BYTES_OF_BF16 = tl.constexpr(_bytes_of_bf16())
_BYTES_OF_FP16 = tl.constexpr(_bytes_of_fp16())
_OUTPUTS_OF_BYTES = tl.constexpr("=h,=h,=h,=h,r")
_TABLE = tl.constexpr(_table())
_OUTPUTS_OF_TABLE = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r,r,r")
_FOUR = tl.constexpr((tl.int16,) * 4)
_OF_E2M1 = tl.constexpr(_e2m1())


@triton.jit
def integers_in_assembly(words, less, IS_BF16: tl.constexpr):
    """int16, eight times the shape of `words`: the bits of codes minus zeros, by input. `less` is from `pairs_of`."""
    ASSEMBLY: tl.constexpr = _OF_BF16 if IS_BF16 else _OF_FP16
    return tl.inline_asm_elementwise(ASSEMBLY, _OUTPUTS, [words, less], dtype=_EIGHT, is_pure=True, pack=1)


@triton.jit
def scaled_in_assembly(words, high, scales, summands, HIGH: tl.constexpr, IS_BF16: tl.constexpr):
    """int16, eight times the shape of `words`: the bits of (128 + c) * scale + summand, by input.

    int32 `high` has HIGH more bits of each code of a word. Scales and summands are the bits of fp32.
    """
    ASSEMBLY: tl.constexpr = _SCALED_BF16[HIGH] if IS_BF16 else _SCALED_FP16[HIGH]
    return tl.inline_asm_elementwise(
        ASSEMBLY, _OUTPUTS_OF_SCALED, [words, high, scales, summands], dtype=_EIGHT, is_pure=True, pack=1
    )


@triton.jit
def e2m1_in_assembly(words, scales):
    """int16, eight times the shape of `words`: the bits of bf16, by input. `scales` are from `scales_of`."""
    return tl.inline_asm_elementwise(_OF_E2M1, _OUTPUTS, [words, scales], dtype=_EIGHT, is_pure=True, pack=1)


@triton.jit
def table_in_assembly(words, bytes_ptr):
    """int16, eight times the shape of `words`: values by input, of which `bytes_ptr` has int32[8] bytes."""
    return tl.inline_asm_elementwise(
        _TABLE, _OUTPUTS_OF_TABLE,
        [
            words, tl.load(bytes_ptr), tl.load(bytes_ptr + 1), tl.load(bytes_ptr + 2), tl.load(bytes_ptr + 3),
            tl.load(bytes_ptr + 4), tl.load(bytes_ptr + 5), tl.load(bytes_ptr + 6), tl.load(bytes_ptr + 7),
        ],
        dtype=_EIGHT, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def table_in_parts(words, bytes_ptr):
    """As `table_in_assembly`."""
    return (
        _value(words, bytes_ptr, 0), _value(words, bytes_ptr, 16),
        _value(words, bytes_ptr, 4), _value(words, bytes_ptr, 20),
        _value(words, bytes_ptr, 8), _value(words, bytes_ptr, 24),
        _value(words, bytes_ptr, 12), _value(words, bytes_ptr, 28),
    )  # fmt: skip


@triton.jit
def bytes_in_assembly(words, IS_BF16: tl.constexpr):
    """int16, four times the shape of `words`: the bits of signed bytes, which are numbers of four inputs."""
    ASSEMBLY: tl.constexpr = _BYTES_OF_BF16 if IS_BF16 else _BYTES_OF_FP16
    return tl.inline_asm_elementwise(ASSEMBLY, _OUTPUTS_OF_BYTES, [words], dtype=_FOUR, is_pure=True, pack=1)


@triton.jit
def bytes_in_parts(words, IS_BF16: tl.constexpr):
    """As `bytes_in_assembly`."""
    return (
        _byte(words, 24, IS_BF16), _byte(words, 16, IS_BF16), _byte(words, 8, IS_BF16), _byte(words, 0, IS_BF16)
    )  # fmt: skip


@triton.jit
def integers_in_parts(words, less, IS_BF16: tl.constexpr):
    """As `integers_in_assembly`."""
    return (
        _integer(words, less, 0, IS_BF16), _integer(words, less, 16, IS_BF16),
        _integer(words, less, 4, IS_BF16), _integer(words, less, 20, IS_BF16),
        _integer(words, less, 8, IS_BF16), _integer(words, less, 24, IS_BF16),
        _integer(words, less, 12, IS_BF16), _integer(words, less, 28, IS_BF16),
    )  # fmt: skip


@triton.jit
def scaled_in_parts(words, high, scales, summands, HIGH: tl.constexpr, IS_BF16: tl.constexpr):
    """As `scaled_in_assembly`."""
    return (
        _scaled_one(words, high, scales, summands, 0, HIGH, IS_BF16),
        _scaled_one(words, high, scales, summands, 1, HIGH, IS_BF16),
        _scaled_one(words, high, scales, summands, 2, HIGH, IS_BF16),
        _scaled_one(words, high, scales, summands, 3, HIGH, IS_BF16),
        _scaled_one(words, high, scales, summands, 4, HIGH, IS_BF16),
        _scaled_one(words, high, scales, summands, 5, HIGH, IS_BF16),
        _scaled_one(words, high, scales, summands, 6, HIGH, IS_BF16),
        _scaled_one(words, high, scales, summands, 7, HIGH, IS_BF16),
    )


@triton.jit
def e2m1_in_parts(words, scales):
    """As `e2m1_in_assembly`."""
    return (
        _e2m1_times(words, scales, 0), _e2m1_times(words, scales, 16),
        _e2m1_times(words, scales, 4), _e2m1_times(words, scales, 20),
        _e2m1_times(words, scales, 8), _e2m1_times(words, scales, 24),
        _e2m1_times(words, scales, 12), _e2m1_times(words, scales, 28),
    )  # fmt: skip


@triton.jit
def _value(words, bytes_ptr, PLACE: tl.constexpr):
    codes = (words >> PLACE) & 15
    shifts = (codes & 3) * 8
    upper = (tl.load(bytes_ptr + (codes >> 2)) >> shifts) & 255
    lower = (tl.load(bytes_ptr + 4 + (codes >> 2)) >> shifts) & 255
    return ((upper << 8) | lower).to(tl.int16)


@triton.jit
def _byte(words, ABOVE: tl.constexpr, IS_BF16: tl.constexpr):
    numbers = ((words << ABOVE) >> 24).to(tl.float32)
    return _upper_half(numbers) if IS_BF16 else numbers.to(tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def _integer(words, less, PLACE: tl.constexpr, IS_BF16: tl.constexpr):
    codes = ((words >> PLACE) & 15).to(tl.float32)
    if IS_BF16:
        bits = _upper_half(codes + 128.0 + (less << 16).to(tl.float32, bitcast=True))
    else:
        numbers = codes + 1024.0 + less.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        bits = numbers.to(tl.float16).to(tl.int16, bitcast=True)
    return bits


@triton.jit
def _scaled_one(words, high, scales, summands, K: tl.constexpr, HIGH: tl.constexpr, IS_BF16: tl.constexpr):
    codes = ((words >> (K % 2 * 16 + K // 2 * 4)) & 15) | (((high >> (HIGH * K)) & ((1 << HIGH) - 1)) << 4)
    scales, summands = scales.to(tl.float32, bitcast=True), summands.to(tl.float32, bitcast=True)
    numbers = tl.fma(codes.to(tl.float32) + 128.0, scales, summands)
    return numbers.to(tl.bfloat16 if IS_BF16 else tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def _e2m1_times(words, scales, PLACE: tl.constexpr):
    codes = (words >> PLACE) & 15
    tiny = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True)
    return _upper_half(tiny * (scales << 16).to(tl.float32, bitcast=True))


@triton.jit
def _upper_half(numbers):
    """int16: the bits of bf16, for numbers that it holds."""
    return (numbers.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


integers = integers_in_parts if knobs.runtime.interpret else integers_in_assembly
scaled = scaled_in_parts if knobs.runtime.interpret else scaled_in_assembly
table = table_in_parts if knobs.runtime.interpret else table_in_assembly
signed_bytes = bytes_in_parts if knobs.runtime.interpret else bytes_in_assembly
e2m1 = e2m1_in_parts if knobs.runtime.interpret else e2m1_in_assembly


@triton.jit
def pairs_of(zeros, IS_BF16: tl.constexpr):
    """int32: what `integers` adds for zeros below 128: -(128 + zero) twice in bf16, or -(1024 + zero) in fp16."""
    EXPONENT: tl.constexpr = 0xC300 if IS_BF16 else 0xE400
    return (zeros.to(tl.int32) | EXPONENT) * 0x10001


@triton.jit
def scales_of(exponents):
    """int32: what `e2m1` multiplies by for scales of 2 ** (exponent - 127), at most 2: 2**126 of them twice in bf16."""
    return (exponents.to(tl.int32) + 126) * 0x800080


@triton.jit
def in_order(halves):
    """[N, W, 8]: eight tensors [N, W] as one, in the order of inputs."""
    # The index of the outer join is the last in the new shape, so it is the lowest bits of the place.
    even = tl.join(tl.join(halves[0], halves[4]), tl.join(halves[2], halves[6]))
    odd = tl.join(tl.join(halves[1], halves[5]), tl.join(halves[3], halves[7]))
    return tl.join(even, odd)


@triton.jit
def words_tile(plane_ptr, rows, first, row_bytes, EACH: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """int32[N, BLOCK_K / EACH]: the codes of inputs from `first` on, a multiple of BLOCK_K; EACH word has so many."""
    at = first // EACH + tl.arange(0, BLOCK_K // EACH)
    ptrs = plane_ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * (row_bytes // 4) + at[None, :]
    return tl.load(ptrs) if EVEN_K else tl.load(ptrs, mask=at[None, :] < row_bytes // 4, other=0)
