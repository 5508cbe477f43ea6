"""Parts of quantized matrices: the same numbers as the whole has there, read without much else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.gpu_worker.formats.made import made
from penstock.gpu_worker.models.loading.stored import BytesRead, StoredWeights
from penstock.kernels.quantized.weight import dequantized
from penstock.models.check import ModelTensors
from penstock.models.files.source import LoadError, StoredTensor
from penstock.models.formats.format import MatrixFormat
from penstock.models.formats.gguf import GGUFBlocks
from penstock.models.formats.made import Recipe
from penstock.models.formats.registry import quantization_of
from penstock.models.gguf.block_types import BLOCK_TYPES
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.weights.sources import WHOLE, Cut
from tests.gpu_worker.formats import writers
from tests.gpu_worker.formats.test_gguf_blocks import _random_blocks
from tests.gpu_worker.formats.test_models_in_formats import FORMATS
from tests.gpu_worker.formats.writers import Writer

NAME = "model.layers.0.mlp.down_proj.weight"
DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
CUTS = [
    Cut(outputs=((0, 48),)),
    Cut(outputs=((96, 144), (240, 288))),  # a part of q heads, and of k heads
    Cut(outputs=((50, 77),)),  # within what is packed together
    Cut(outputs=((280, 300),)),  # the last ones, in a block that is not full
    Cut(inputs=((0, 256),)),
    Cut(inputs=((256, 640),)),
    Cut(inputs=((160, 320),)),  # no group of 128 begins there
    Cut(outputs=((3, 200),), inputs=((384, 640),)),
]
IN_ORDER = {**FORMATS, "gptq-3": (lambda: writers.gptq(3, 32, version=2), ""), "nested-odd-blocks": (writers.nf4, "")}
IN_ORDER.pop("gptq-4-order")


def stored(tensors: dict[str, Tensor]) -> dict[str, StoredTensor]:
    def as_stored(tensor: Tensor) -> StoredTensor:
        data = memoryview(bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()))
        return StoredTensor(tuple(tensor.shape), DTYPES[tensor.dtype], len(data), lambda: data)

    return {name: as_stored(tensor) for name, tensor in tensors.items()}


def _ignore() -> None:
    """What is read needs no bar."""


def check(format: MatrixFormat, name: str, tensors: dict[str, StoredTensor], shape: tuple[int, ...], cut: Cut) -> None:
    counted, of_part = BytesRead(), BytesRead()
    model = ModelTensors(tensors, {name: format}, {})
    whole = StoredWeights(model, {name: shape}, _ignore, counted).read_quantized(name, WHOLE)
    part = StoredWeights(model, {name: shape}, _ignore, of_part).read_quantized(name, cut)
    assert whole is not None
    assert part is not None
    wanted = dequantized(whole)
    for axis, ranges in ((-3, cut.items), (-2, cut.outputs), (-1, cut.inputs)):
        if ranges is not None:
            wanted = torch.cat([wanted.narrow(axis, begin, end - begin) for begin, end in ranges], dim=axis)
    torch.testing.assert_close(dequantized(part), wanted, rtol=0, atol=0, equal_nan=True)
    assert part.inputs is None or whole.inputs is None or part.inputs.dtype == whole.inputs.dtype
    share = wanted.numel() / np.prod(shape)
    assert of_part.total < counted.total * (share + 0.35)  # what groups, blocks and nested scales keep together


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", IN_ORDER)
def test_part_of_a_matrix(name: str, cut: Cut) -> None:
    writer = IN_ORDER[name][0]()
    shape: tuple[int, ...] = (300, 640)
    if "awq" in name or "gptq" in name:
        shape = (304, 640)
    if name == "nested-odd-blocks":
        shape = (300, 720)  # blocks of 64 go over the ends of rows
    weight = NAME
    if name.startswith("mxfp4"):
        weight, shape = NAME.removesuffix(".weight"), (2, *shape)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tensors, _ = writer.write(weight, matrix.mT.contiguous() if len(shape) == 3 else matrix)
    check(format_of(writer, weight), weight, stored(tensors), shape, cut)


def format_of(writer: Writer, name: str) -> MatrixFormat:
    quantization = quantization_of(JsonFields("config.json", {"quantization_config": writer.config}))
    assert quantization is not None
    format = quantization.format_of(name)
    assert format is not None
    return format


@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_part_of_gguf_blocks(block_type: str) -> None:
    shape = (3, 20, 1024)
    data = memoryview(bytearray(_random_blocks(block_type, shape).tobytes()))
    tensors = {NAME: StoredTensor(shape, block_type, len(data), lambda: data)}
    for cut in (
        Cut(outputs=((3, 7), (11, 20))),
        Cut(inputs=((256, 768),)),
        Cut(items=((1, 3),), inputs=((512, 1024),)),
        Cut(inputs=((320, 544),)),  # within a super-block
    ):
        check(GGUFBlocks(block_type), NAME, tensors, shape, cut)


def test_inputs_in_the_order_of_their_importance_are_not_split() -> None:
    writer = writers.gptq(4, 32, has_order=True)
    tensors, _ = writer.write(NAME, torch.randn(64, 640))
    check(format_of(writer, NAME), NAME, stored(tensors), (64, 640), Cut(outputs=((8, 24),)))
    with pytest.raises(LoadError, match="in the order of their importance"):
        check(format_of(writer, NAME), NAME, stored(tensors), (64, 640), Cut(inputs=((0, 320),)))


@pytest.mark.parametrize("format", ["int8", "int8_weight_only", "fp8"])
def test_parts_made_with_the_largest_of_all_inputs_are_parts_of_the_whole(format: Any) -> None:
    matrix = torch.randn(40, 96)
    whole = dequantized(made(matrix, Recipe(format)))
    largest: Callable[[Tensor], Tensor] = lambda of_part: matrix.abs().amax(dim=-1, keepdim=True)  # noqa: E731
    parts = [dequantized(made(part.contiguous(), Recipe(format), of_whole=largest)) for part in matrix.split(32, 1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=0)
