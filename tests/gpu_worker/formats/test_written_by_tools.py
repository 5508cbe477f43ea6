"""Matrices that the formats' own tools packed, bit for bit as those tools, or their formulas, read them.

The files in `written/` were made once: GPTQ's by `pack_original` of GPTQModel 7.7.0 (version 1 of the layout by taking
one from each word of zero points, as its export does), AWQ's by `pack_awq` of the same, bitsandbytes' by 0.50.2 on a
CPU. "expected" is what the tool's own function for it gives; for GPTQ, the formula over the codes before packing; for
blocks that go over the ends of rows, bitsandbytes' function in Python, since its compiled one for CPUs misreads those.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.gpu_worker.formats.registry import decode
from penstock.kernels.quantized.weight import QuantizedWeight, dequantized
from penstock.models.formats.awq import AWQMatrix
from penstock.models.formats.bitsandbytes import BlocksMatrix, Int8Matrix
from penstock.models.formats.format import MatrixFormat
from penstock.models.formats.gptq import GPTQMatrix
from tests.gpu_worker.formats.stored import stored_parts

WRITTEN = Path(__file__).parent / "written"
FILES: dict[str, MatrixFormat] = {
    "awq-32": AWQMatrix(32),
    "awq-all": AWQMatrix(None),
    "bnb-fp4-ragged": BlocksMatrix("fp4", is_nested=True),
    "bnb-int8": Int8Matrix(),
    "bnb-nf4": BlocksMatrix("nf4", is_nested=False),
    "bnb-nf4-nested": BlocksMatrix("nf4", is_nested=True),
    "gptq-2-v1": GPTQMatrix(2, 32, version=1, has_order=False),
    "gptq-2-v2": GPTQMatrix(2, 16, version=2, has_order=False),
    "gptq-3-v1": GPTQMatrix(3, 32, version=1, has_order=False),
    "gptq-4-v1": GPTQMatrix(4, 32, version=1, has_order=False),
    "gptq-4-v1-sym": GPTQMatrix(4, 32, version=1, has_order=False),
    "gptq-4-v2-order": GPTQMatrix(4, 32, version=2, has_order=True),
    "gptq-8-v1-order": GPTQMatrix(8, 32, version=1, has_order=True),
    "gptq-8-v2-all": GPTQMatrix(8, None, version=2, has_order=False),
}


def test_every_file_is_read() -> None:
    assert {path.stem for path in WRITTEN.iterdir()} == {*FILES}


@pytest.mark.parametrize("name", FILES)
def test_numbers_are_those_of_the_tool(name: str) -> None:
    weight, expected, rows = _read(name)
    assert int(weight.codes.max()) < 2**weight.bits
    rounding = 2**-22 if name == "bnb-int8" else 0.0  # there the two factors of a scale come in another order
    torch.testing.assert_close(dequantized(weight)[rows], expected, rtol=rounding, atol=0.0)


def test_orders_and_zero_points_are_kept_only_where_they_are_needed() -> None:
    symmetric, asymmetric, ordered = (_read(name)[0] for name in ("gptq-4-v1-sym", "gptq-4-v1", "gptq-4-v2-order"))
    assert (symmetric.zeros, symmetric.order) == (8, None)
    assert isinstance(asymmetric.zeros, torch.Tensor)
    assert ordered.order is not None


def _read(name: str) -> tuple[QuantizedWeight, torch.Tensor, torch.Tensor]:
    """The matrix, and what some of its rows must be."""
    tensors = load_file(WRITTEN / f"{name}.safetensors")
    expected, rows = tensors.pop("expected"), tensors.pop("rows", None)
    rows = torch.arange(len(expected)) if rows is None else rows
    shape = (int(rows.max()) + 1, expected.shape[1])
    named = {f"m.{key}": tensor for key, tensor in tensors.items()}
    weight = decode(FILES[name], stored_parts(FILES[name], "m.weight", shape, named))
    assert weight.codes.shape == shape
    return weight, expected, rows
