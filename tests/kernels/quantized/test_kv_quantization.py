"""Quantized pages: what a head costs, how far numbers move, and that positions do not touch each other."""

import pytest
import torch

from penstock.kernels.attention.kv_quantization import (
    KV_FORMATS,
    PageLayout,
    Quantized,
    dequantize,
    quantize,
    read_quantized,
    write_quantized,
)

FORMATS = sorted(KV_FORMATS)


@pytest.mark.parametrize(
    ("name", "head_dim", "expected"),
    [
        ("int8", 64, 66),
        ("fp8_e4m3", 128, 130),
        ("fp8_e5m2", 80, 82),
        ("int4", 64, 40),
        ("int4", 80, 60),
        ("int4", 8, 20),
    ],
)
def test_bytes_of_a_head(name: str, head_dim: int, expected: int) -> None:
    assert KV_FORMATS[name].head_bytes(head_dim) == expected


def test_int8_has_room_for_nearly_twice_the_tokens() -> None:
    for head_dim in (64, 128, 256):
        assert 2 * head_dim / KV_FORMATS["int8"].head_bytes(head_dim) >= 1.9


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("size", [1e-4, 1.0, 3e3])
def test_numbers_move_by_half_a_step_at_most(name: str, head_dim: int, size: float) -> None:
    """A step of int8 is the scale, of int4 that of its group, of fp8 its spacing at the number."""
    torch.manual_seed(0)
    format = KV_FORMATS[name]
    x = torch.randn(200, 3, head_dim) * size
    x[::2] += 2 * size  # not around zero
    x[7, 1] = 0.0
    its = quantize(x, format)
    moved = (dequantize(its, format, head_dim) - x).abs().double()
    if name == "int4":
        steps = its.scales.double().unflatten(-1, (-1, 2))[..., :1].expand(*its.scales.shape[:-1], -1, 32)
        bounds = steps.flatten(-2)[..., :head_dim] / 2
    elif name == "int8":
        bounds = its.scales.double() / 2
    else:
        mantissa, subnormal = {"fp8_e4m3": (3, 2.0**-9), "fp8_e5m2": (2, 2.0**-16)}[name]
        bounds = torch.maximum(x.double().abs() * 2.0 ** -(mantissa + 1), its.scales.double() * subnormal / 2)
    # The largest number may be past the largest code, as the scale is rounded: by its rounding, fp16's smallest step
    # at most for each unit of the code. The products and sums of fp32 round, too.
    bounds = bounds + format.largest * 2.0**-25 + x.double().abs() * 2.0**-22
    assert (moved <= bounds).all(), (moved - bounds).max()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_huge_numbers_stay_finite(name: str) -> None:
    format = KV_FORMATS[name]
    x = torch.tensor([[0.0] * 32, [1e9] * 32, [-1e9] + [0.0] * 31, [1e-30] * 32])
    again = dequantize(quantize(x, format), format, 32)
    assert again.isfinite().all()
    assert not again[0].any()


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_a_scale_of_the_checkpoint_is_the_scale_of_every_position(name: str) -> None:
    format = KV_FORMATS[name]
    torch.manual_seed(0)
    x = torch.randn(5, 2, 16)
    its = quantize(x, format, 0.03125)
    assert (its.scales == 0.03125).all()
    expected = (x / 0.03125).clamp(-format.largest, format.largest)
    expected = expected.round() if format.fp8 is None else expected.to(format.fp8).float()
    torch.testing.assert_close(dequantize(its, format, 16), expected * 0.03125, rtol=0, atol=0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("head_dim", "unused"), [(64, 0), (40, 12)])
def test_a_position_is_its_own_bytes(name: str, head_dim: int, unused: int) -> None:
    """Written in one call or one by one, in any order: the same pages. Unused bytes stay as they were."""
    torch.manual_seed(0)
    layout = PageLayout(KV_FORMATS[name], 4, head_dim)
    x = torch.randn(6, head_dim)
    cells = torch.tensor([3, 4, 5, 23, 0, 9])
    together = torch.full((3, 2, layout.used_bytes + unused), 7, dtype=torch.uint8)
    apart = together.clone()
    write_quantized(together, layout, cells, x)
    for i in (5, 2, 0, 3, 1, 4):
        write_quantized(apart, layout, cells[i : i + 1], x[i : i + 1])
    assert torch.equal(together, apart)
    assert (together[..., layout.used_bytes :] == 7).all()
    read = read_quantized(together, layout)
    assert read.shape == (3, 2, 4, head_dim)
    expected = dequantize(quantize(x, layout.format), layout.format, head_dim)
    assert torch.equal(read.view(-1, head_dim)[cells], expected)


def test_halves_of_an_int4_byte() -> None:
    """Byte i of a group has number i in its low half, number i + 16 in its high half."""
    x = torch.arange(32.0)[None] % 16
    its = quantize(x, KV_FORMATS["int4"])
    assert its.codes[0].tolist() == [i | i << 4 for i in range(16)]
    assert its.scales[0].tolist() == [1.0, 0.0]
    bumped = Quantized(its.codes, torch.tensor([[2.0, -1.0]], dtype=torch.float16))
    assert torch.equal(dequantize(bumped, KV_FORMATS["int4"], 32), x * 2 - 1)
