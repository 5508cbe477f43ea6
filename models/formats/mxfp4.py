"""MXFP4 as in gpt-oss: the experts' matrices, in blocks of 32 inputs."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.models.files.source import LoadError
from penstock.models.formats.format import ITEMS, OUTPUTS, Along, Part, QuantizationMethod, Shape
from penstock.models.parsing.json_fields import JsonFields

BLOCK = 32


class MXFP4Matrix(NamedTuple):
    """See `MatrixFormat`; what the tensors hold is in `gpu_worker/formats/mxfp4.py`."""

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        if shape[-1] % BLOCK:
            raise LoadError(f"{name} has {shape[-1]} inputs, but MXFP4 has blocks of {BLOCK}")
        blocks = (*shape[:-1], shape[-1] // BLOCK)
        axes = (*(ITEMS,) * len(shape[:-2]), OUTPUTS, Along("inputs", BLOCK))
        return {
            "codes": Part(f"{name}_blocks", (*blocks, BLOCK // 2), ("U8",), axes=(*axes, None)),
            "scales": Part(f"{name}_scales", blocks, ("U8",), axes=axes),
        }


class MXFP4(NamedTuple):
    """See `Quantization`."""

    name: str = "MXFP4"

    def format_of(self, name: str) -> MXFP4Matrix | None:
        """Only matrices of all experts in one tensor are in this format; their names end without ".weight"."""
        return None if name.endswith(".weight") else MXFP4Matrix()

    def ignores(self, name: str) -> bool:
        return False


def parse(fields: JsonFields) -> MXFP4:
    """As `Parse`. The modules in `modules_to_not_convert` are stored as floats anyway."""
    return MXFP4()


MXFP4_METHOD = QuantizationMethod("mxfp4", parse)
