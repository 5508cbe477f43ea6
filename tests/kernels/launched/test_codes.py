"""The numbers for all codes of quantized pages, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl

from penstock.kernels.attention.kv_quantization import KV_FORMATS, Quantized, dequantize
from penstock.kernels.triton.attention.kv_tiles import from_bytes, from_int4

NAMES = ["int8", "fp8_e5m2", "fp8_e4m3", "fp8_e4m3_bits"]


@triton.jit
def unpack_bytes(codes_ptr, out_ptr, FORMAT: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, from_bytes(tl.load(codes_ptr + at), FORMAT))


@triton.jit
def unpack_int4(codes_ptr, pairs_ptr, out_ptr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    codes = tl.load(codes_ptr + rows * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)[None, :])
    pairs = tl.load(pairs_ptr + rows * (BLOCK_D // 32) + tl.arange(0, BLOCK_D // 32)[None, :])
    tile = from_int4(codes, pairs, out_ptr.dtype.element_ty, BLOCK_D)
    tl.store(out_ptr + rows * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], tile)


@pytest.mark.parametrize("name", NAMES)
def test_every_byte(device: str, name: str) -> None:
    if device == "cuda" and name == "fp8_e4m3" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no conversion")
    codes = torch.arange(256, device=device).to(torch.uint8)
    got = torch.zeros(256, dtype=torch.float16, device=device)
    unpack_bytes[(1,)](codes, got, name, num_warps=1)
    kv_format = KV_FORMATS[name.removesuffix("_bits")]
    one = torch.ones(256, 1, dtype=torch.float16, device=device)
    expected = dequantize(Quantized(codes[:, None], one), kv_format, 1)[:, 0]
    if name.endswith("_bits"):
        expected = expected * 2.0**-8
    written = expected.isfinite()  # no others are ever written
    assert written.sum() >= 248
    assert torch.equal(got[written].view(torch.int16), expected[written].half().view(torch.int16))


@pytest.mark.parametrize("is_half", [True, False])
def test_every_byte_of_int4(device: str, is_half: bool) -> None:
    """Both codes of each byte, with scales and minimums of many sizes; in fp16 the sum is rounded once."""
    rows, dim = 64, 128
    codes = torch.stack([torch.randperm(256) for _ in range(rows // 4)]).view(rows, dim // 2).to(torch.uint8)
    scales = torch.rand(rows, dim // 32) * 2.0 ** torch.randint(-20, 10, (rows, dim // 32))
    minimums = torch.randn(rows, dim // 32) * 2.0 ** torch.randint(-20, 12, (rows, dim // 32))
    pairs = torch.stack((scales, minimums), -1).half()
    pairs[0, 0] = torch.tensor((65504.0, 65504.0))  # beyond fp16
    codes, pairs = codes.to(device), pairs.to(device)
    got = torch.zeros(rows, dim, dtype=torch.float16 if is_half else torch.float32, device=device)
    unpack_int4[(1,)](codes, pairs.view(torch.int32), got, rows, dim, num_warps=4)
    expected = dequantize(Quantized(codes, pairs.flatten(-2)), KV_FORMATS["int4"], dim)
    assert got.isfinite().all()
    # A number is rounded once; the largest numbers of fp16 are where the group that is beyond it was shrunk to.
    rtol, atol = (1.01 * 2.0**-11, 1.01 * 2.0**-25) if is_half else (1e-6, 1e-6)
    within = slice(1, None) if is_half else slice(None)
    torch.testing.assert_close(got[within].float(), expected[within], rtol=rtol, atol=atol)
