"""Stored tensors by the roles that a format gives them, checked as a checkpoint's are."""

from collections.abc import Mapping

from torch import Tensor

from penstock.models.formats.format import MatrixFormat, Part, Shape

_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U8": "uint8",
}


def stored_parts(format: MatrixFormat, name: str, shape: Shape, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of a weight; all tensors must be parts, and fit."""
    parts = format.parts(name, shape)
    found = {role: tensor for role, part in parts.items() if (tensor := _find(part, tensors)) is not None}
    for role, part in parts.items():
        assert role in found or part.is_optional, part
    assert len(found) == len(tensors), sorted(tensors)
    return found


def _find(part: Part, tensors: Mapping[str, Tensor]) -> Tensor | None:
    tensor = next((tensors[name] for name in (part.name, *part.other_names) if name in tensors), None)
    if tensor is not None:
        assert part.shape is None or [size for size in part.shape if size != 1] == [s for s in tensor.shape if s != 1]
        assert str(tensor.dtype).removeprefix("torch.") in {_DTYPES.get(its) for its in part.dtypes}, part
    return tensor
