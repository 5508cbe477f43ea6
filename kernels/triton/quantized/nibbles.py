"""Codes of 4 bits as numbers in half precision, in pairs as GPUs multiply them.

A word of 32 bits has eight codes (`penstock.kernels.quantized.device_weight`): those of inputs 2 * j and 2 * j + 1 are
j nibbles above the lowest one of each half. So one instruction takes out both, and gives them an exponent with which
they are 128 + c in bf16, or 1024 + c in fp16. The next one subtracts that and the zero, exactly. If few inputs share a
scale, each code becomes 128 + c in fp32 instead, is multiplied and added to, and rounded to half precision once.

Triton's language has no halves of words, and its interpreter no assembly, so it computes the same part by part.
"""

import triton
import triton.language as tl
from triton import knobs

_OUTPUTS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r")
_OUTPUTS_OF_SCALED = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r")
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


def _scaled(kind: str) -> str:
    """Pairs of (128 + c) * scale + summand; $8 is the word, and $9 and $10 are the bits of fp32."""
    each = "".join(
        f"""
    shl.b32 low, $8, {16 - 4 * j};
    lop3.b32 low, low, mask, exponent, 0xEA;
    fma.rn.f32 of_low, low, $9, $10;
    {f"shr.b32 high, $8, {4 * j}" if j else "mov.b32 high, $8"};
    lop3.b32 high, high, mask, exponent, 0xEA;
    fma.rn.f32 of_high, high, $9, $10;
    cvt.rn.{kind}.f32 pair, of_high, of_low;
    mov.b32 {{${2 * j}, ${2 * j + 1}}}, pair;"""
        for j in range(4)
    )
    return f"""{{
    .reg .b32 low, high, pair, mask, exponent;
    .reg .f32 of_low, of_high;
    mov.b32 mask, 0x000F0000;
    mov.b32 exponent, 0x43000000;{each}
}}"""


def _e2m1() -> str:
    """Pairs in bf16; $9 is a pair of scales. The bits of a code are those of bf16 for numbers smaller by 2**126."""
    each = "".join(
        f"""
    shl.b32 sign, $8, {12 - 4 * j};
    and.b32 sign, sign, signs;
    {"shl" if j < 2 else "shr"}.b32 pair, $8, {abs(6 - 4 * j)};
    lop3.b32 pair, pair, sizes, sign, 0xEA;
    fma.rn.bf16x2 pair, pair, large, signs;
    fma.rn.bf16x2 pair, pair, $9, signs;
    mov.b32 {{${2 * j}, ${2 * j + 1}}}, pair;"""
        for j in range(4)
    )
    return f"""{{
    .reg .b32 pair, sign, signs, sizes, large;
    mov.b32 signs, 0x80008000;
    mov.b32 sizes, 0x01C001C0;
    mov.b32 large, 0x7E807E80;{each}
}}"""


_OF_BF16 = tl.constexpr(_integers("bf16x2", "0x43004300", "0x3F803F80"))
_OF_FP16 = tl.constexpr(_integers("f16x2", "0x64006400", "0x3C003C00"))
_SCALED_BF16 = tl.constexpr(_scaled("bf16x2"))
_SCALED_FP16 = tl.constexpr(_scaled("f16x2"))
_OF_E2M1 = tl.constexpr(_e2m1())


@triton.jit
def integers_in_assembly(words, less, IS_BF16: tl.constexpr):
    """int16, eight times the shape of `words`: the bits of codes minus zeros, by input. `less` is from `pairs_of`."""
    ASSEMBLY: tl.constexpr = _OF_BF16 if IS_BF16 else _OF_FP16
    return tl.inline_asm_elementwise(ASSEMBLY, _OUTPUTS, [words, less], dtype=_EIGHT, is_pure=True, pack=1)


@triton.jit
def scaled_in_assembly(words, scales, summands, IS_BF16: tl.constexpr):
    """int16, eight times the shape of `words`: the bits of (128 + c) * scale + summand, from those of fp32."""
    ASSEMBLY: tl.constexpr = _SCALED_BF16 if IS_BF16 else _SCALED_FP16
    return tl.inline_asm_elementwise(
        ASSEMBLY, _OUTPUTS_OF_SCALED, [words, scales, summands], dtype=_EIGHT, is_pure=True, pack=1
    )


@triton.jit
def e2m1_in_assembly(words, scales):
    """int16, eight times the shape of `words`: the bits of bf16, by input. `scales` are pairs of bf16."""
    return tl.inline_asm_elementwise(_OF_E2M1, _OUTPUTS, [words, scales], dtype=_EIGHT, is_pure=True, pack=1)


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
def scaled_in_parts(words, scales, summands, IS_BF16: tl.constexpr):
    """As `scaled_in_assembly`."""
    scales, summands = scales.to(tl.float32, bitcast=True), summands.to(tl.float32, bitcast=True)
    return (
        _scaled_one(words, scales, summands, 0, IS_BF16), _scaled_one(words, scales, summands, 16, IS_BF16),
        _scaled_one(words, scales, summands, 4, IS_BF16), _scaled_one(words, scales, summands, 20, IS_BF16),
        _scaled_one(words, scales, summands, 8, IS_BF16), _scaled_one(words, scales, summands, 24, IS_BF16),
        _scaled_one(words, scales, summands, 12, IS_BF16), _scaled_one(words, scales, summands, 28, IS_BF16),
    )  # fmt: skip


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
def _integer(words, less, PLACE: tl.constexpr, IS_BF16: tl.constexpr):
    codes = ((words >> PLACE) & 15).to(tl.float32)
    if IS_BF16:
        bits = _upper_half(codes + 128.0 + (less << 16).to(tl.float32, bitcast=True))
    else:
        numbers = codes + 1024.0 + less.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        bits = numbers.to(tl.float16).to(tl.int16, bitcast=True)
    return bits


@triton.jit
def _scaled_one(words, scales, summands, PLACE: tl.constexpr, IS_BF16: tl.constexpr):
    numbers = tl.fma(((words >> PLACE) & 15).to(tl.float32) + 128.0, scales, summands)
    return numbers.to(tl.bfloat16 if IS_BF16 else tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def _e2m1_times(words, scales, PLACE: tl.constexpr):
    codes = (words >> PLACE) & 15
    tiny = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True)
    return _upper_half(tiny * 8.507059173023462e37 * (scales << 16).to(tl.float32, bitcast=True))


@triton.jit
def _upper_half(numbers):
    """int16: the bits of bf16, for numbers that it holds."""
    return (numbers.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


integers = integers_in_parts if knobs.runtime.interpret else integers_in_assembly
scaled = scaled_in_parts if knobs.runtime.interpret else scaled_in_assembly
e2m1 = e2m1_in_parts if knobs.runtime.interpret else e2m1_in_assembly


@triton.jit
def pairs_of(zeros, IS_BF16: tl.constexpr):
    """int32: what `integers` adds for zeros below 128: -(128 + zero) twice in bf16, or -(1024 + zero) in fp16."""
    EXPONENT: tl.constexpr = 0xC300 if IS_BF16 else 0xE400
    return (zeros.to(tl.int32) | EXPONENT) * 0x10001


@triton.jit
def in_order(halves):
    """[N, W, 8]: eight tensors [N, W] as one, in the order of inputs."""
    # The index of the outer join is the last in the new shape, so it is the lowest bits of the place.
    even = tl.join(tl.join(halves[0], halves[4]), tl.join(halves[2], halves[6]))
    odd = tl.join(tl.join(halves[1], halves[5]), tl.join(halves[3], halves[7]))
    return tl.join(even, odd)


@triton.jit
def words_tile(plane_ptr, rows, first, row_bytes, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """int32[N, BLOCK_K / 8]: the codes of inputs from `first` on, a multiple of BLOCK_K."""
    at = first // 8 + tl.arange(0, BLOCK_K // 8)
    ptrs = plane_ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * (row_bytes // 4) + at[None, :]
    return tl.load(ptrs) if EVEN_K else tl.load(ptrs, mask=at[None, :] < row_bytes // 4, other=0)
