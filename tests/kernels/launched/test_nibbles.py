"""Codes of 4 bits in half precision: bit for bit what torch computes, in assembly on a GPU and in parts elsewhere."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.quantized.device_weight import E2M1, NIBBLES, pack_for_device
from penstock.kernels.triton.quantized.nibbles import (
    e2m1,
    in_order,
    integers,
    pairs_of,
    scaled,
    scales_of,
    signed_bytes,
    table,
)
from tests.kernels.interpreter_limits import dtypes
from tests.kernels.quantized_cases import FORMATS, NF4

WORDS = 2048


@triton.jit
def unpack_kernel(
    words_ptr, high_ptr, one_ptr, two_ptr, out_ptr,
    KIND: tl.constexpr, HIGH: tl.constexpr, IS_BF16: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(W / BLOCK),): BLOCK words, each with one or two numbers for all its codes."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    words, one, two = tl.load(words_ptr + at), tl.load(one_ptr + at), tl.load(two_ptr + at)
    if KIND == "integers":
        halves = integers(words, pairs_of(one, IS_BF16), IS_BF16)
    elif KIND == "scaled":
        halves = scaled(words, tl.load(high_ptr + at), one, two, HIGH, IS_BF16)
    else:
        halves = e2m1(words, scales_of(one))
    bits = tl.reshape(in_order(halves), [1, BLOCK * 8])
    tl.store(out_ptr + tl.program_id(0) * BLOCK * 8 + tl.arange(0, BLOCK * 8)[None, :], bits)


def codes_and_words() -> tuple[Tensor, Tensor]:
    """uint8[W, 8] by input, each code at each place, and int32[W]."""
    codes = torch.randint(16, (WORDS, 8), dtype=torch.uint8)
    codes[:128] = (torch.arange(16)[:, None, None] + torch.eye(8, dtype=torch.int64)).view(128, 8).to(torch.uint8) & 15
    nibbles = codes[:, list(NIBBLES)].long() << torch.arange(0, 32, 4)
    return codes, nibbles.sum(1).to(torch.int32)


def unpacked(
    device: str,
    kind: str,
    dtype: torch.dtype,
    words: Tensor,
    one: Tensor,
    two: Tensor,
    high: Tensor,
    high_bits: int = 0,
) -> Tensor:
    """[W, 8] of `dtype`."""
    out = torch.empty(WORDS * 8, dtype=torch.int16, device=device)
    unpack_kernel[(WORDS // 256,)](
        words.to(device), high.to(device), one.to(device), two.to(device), out, KIND=kind, HIGH=high_bits,
        IS_BF16=dtype == torch.bfloat16, BLOCK=256,
    )  # fmt: skip
    return out.cpu().view(dtype).view(WORDS, 8)


@pytest.mark.parametrize("its_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_integers(device: str, its_dtype: torch.dtype) -> None:
    """With all zeros that there can be."""
    codes, words = codes_and_words()
    zeros = (torch.arange(WORDS, dtype=torch.int32) * 37) % 128
    got = unpacked(device, "integers", its_dtype, words, zeros, zeros, words)
    assert torch.equal(got, (codes.int() - zeros[:, None]).to(its_dtype))


@pytest.mark.parametrize("high_bits", [0, 1, 2])
@pytest.mark.parametrize("its_dtype", [dtype for dtype in dtypes() if dtype != torch.float32], ids=str)
def test_scaled_integers(device: str, its_dtype: torch.dtype, high_bits: int) -> None:
    """Rounded to fp32, by some twice, and then once. (The interpreter cuts off what bf16 does not hold.)"""
    codes, words = codes_and_words()
    of_high = torch.randint(2**high_bits, (WORDS, 8), dtype=torch.uint8)
    high = (of_high.long() << high_bits * torch.arange(8)).sum(1).to(torch.int32)
    scales = (0.5 + torch.rand(WORDS)) / 64
    summands = -128.0 * scales - torch.rand(WORDS) / 8
    one, two = scales.view(torch.int32), summands.view(torch.int32)
    got = unpacked(device, "scaled", its_dtype, words, one, two, high, high_bits)
    exact = (128 + codes + 16.0 * of_high.double()) * scales.double()[:, None] + summands.double()[:, None]
    unit = 2.0**-8 if its_dtype == torch.bfloat16 else 2.0**-11
    assert bool(((got.double() - exact).abs() <= unit * exact.abs() + 2.0**-24 * 192 * scales[:, None]).all())


def test_e2m1(device: str) -> None:
    """With all exponents, those of the smallest numbers included."""
    codes, words = codes_and_words()
    exponents = 1 + (torch.arange(WORDS, dtype=torch.int32) * 37) % 128
    got = unpacked(device, "e2m1", torch.bfloat16, words, exponents, exponents, words)
    scales = (exponents << 23).view(torch.float32)
    expected = (E2M1[codes.int()] * scales[:, None]).bfloat16()
    assert torch.equal(got, expected)
    assert torch.equal(got.signbit(), expected.signbit())


@triton.jit
def unpack_bytes_kernel(words_ptr, out_ptr, IS_BF16: tl.constexpr):
    """Grid (1,): 64 words."""
    halves = signed_bytes(tl.load(words_ptr + tl.arange(0, 64)), IS_BF16)
    for k in tl.static_range(4):
        tl.store(out_ptr + tl.arange(0, 64) * 4 + k, halves[k])


@pytest.mark.parametrize("its_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_signed_bytes(device: str, its_dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128).to(torch.int8)[torch.randperm(256)]
    out = torch.empty(256, dtype=torch.int16, device=device)
    unpack_bytes_kernel[(1,)](codes.view(torch.int32).to(device), out, IS_BF16=its_dtype == torch.bfloat16)
    assert torch.equal(out.cpu().view(its_dtype), codes.to(its_dtype))


@triton.jit
def look_up_kernel(words_ptr, bytes_ptr, out_ptr, BLOCK: tl.constexpr):
    """Grid (ceil(W / BLOCK),)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    bits = tl.reshape(in_order(table(tl.load(words_ptr + at), bytes_ptr)), [1, BLOCK * 8])
    tl.store(out_ptr + tl.program_id(0) * BLOCK * 8 + tl.arange(0, BLOCK * 8)[None, :], bits)


@pytest.mark.parametrize("its_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tables(device: str, its_dtype: torch.dtype) -> None:
    codes, words = codes_and_words()
    packed = pack_for_device(FORMATS["NF4"](4, 64), device)
    assert packed.value_bytes is not None
    out = torch.empty(WORDS * 8, dtype=torch.int16, device=device)
    its_bytes = packed.value_bytes[:8] if its_dtype == torch.bfloat16 else packed.value_bytes[8:]
    look_up_kernel[(WORDS // 256,)](words.to(device), its_bytes, out, BLOCK=256)
    assert torch.equal(out.cpu().view(its_dtype).view(WORDS, 8), NF4.to(its_dtype)[codes.int()])
