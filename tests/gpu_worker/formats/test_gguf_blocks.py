"""GGUF's blocks against the `gguf` package: what it dequantizes, and what it writes."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from penstock.gpu_worker.formats.gguf_blocks import LAYOUTS, quantized_weight
from penstock.kernels.quantized.weight import dequantized
from penstock.models.gguf.block_types import BLOCK_TYPES, BY_NUMBER, FLOATS, UNREAD

_HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""Where a block has fp16 numbers: any other bytes may be anything."""
_SHAPES = [(5, 512), (1, 256), (3, 4, 768)]


def _random_blocks(block_type: str, shape: tuple[int, ...]) -> np.ndarray:
    """Every bit random, but for fp16 numbers, which are finite: of all magnitudes, subnormal ones and zeros, too."""
    its = BLOCK_TYPES[block_type]
    generator = np.random.default_rng(len(block_type) + shape[-1])
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // its.num_elements, its.num_bytes), dtype=np.uint8)
    for begin in _HALVES[block_type]:
        halves = generator.integers(0, 0x7C00, blocks.shape[:-1], dtype=np.uint16)
        halves |= generator.integers(0, 2, blocks.shape[:-1], dtype=np.uint16) << 15
        blocks[..., begin : begin + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _check(block_type: str, data: np.ndarray, shape: tuple[int, ...]) -> None:
    weight = quantized_weight(block_type, torch.from_numpy(data.copy()))
    with np.errstate(over="ignore"):  # by the largest scales of MXFP4
        expected = dequantize(data, gguf.GGMLQuantizationType[block_type])
    found = dequantized(weight)
    assert found.shape == torch.Size(shape)
    assert int(weight.codes.max()) < 1 << weight.bits
    np.testing.assert_array_equal(found.numpy().view(np.int32), expected.view(np.int32))


def test_every_type_that_is_read_has_a_layout() -> None:
    assert set(LAYOUTS) == set(BLOCK_TYPES)


def test_the_tables_are_those_of_the_package() -> None:
    for number, name in BY_NUMBER.items():
        kind = gguf.GGMLQuantizationType[name]
        its = (FLOATS | BLOCK_TYPES)[name]
        assert (kind.value, *gguf.GGML_QUANT_SIZES[kind]) == (number, its.num_elements, its.num_bytes)
    assert {kind.value: kind.name for kind in gguf.GGMLQuantizationType} == BY_NUMBER | UNREAD


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("block_type", LAYOUTS)
def test_random_blocks_equal_the_packages_dequantization_bit_for_bit(block_type: str, shape: tuple[int, ...]) -> None:
    _check(block_type, _random_blocks(block_type, shape), shape)


@pytest.mark.parametrize("block_type", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_what_the_package_quantizes_equals_its_own_dequantization(block_type: str) -> None:
    numbers = np.random.default_rng(0).normal(0, 0.02, (7, 512)).astype(np.float32)
    _check(block_type, quantize(numbers, gguf.GGMLQuantizationType[block_type]), numbers.shape)


def test_all_scales_of_mxfp4() -> None:
    data = np.zeros((1, 256, 17), dtype=np.uint8)
    data[0, :, 0] = np.arange(256)
    data[0, :, 1:] = np.arange(16) * 17
    _check("MXFP4", data.reshape(1, -1), (1, 256 * 32))
