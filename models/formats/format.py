"""The interface of a quantized checkpoint: the format of each matrix, and its stored tensors.

`quantization_config` in config.json is parsed into a `Quantization` (`registry.py`), which knows the format of each
matrix. The file of the same name in `gpu_worker/formats/` decodes the stored tensors.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from penstock.config.options import ConfigError
from penstock.models.parsing.json_fields import JsonFields

Shape = tuple[int, ...]
FLOATS = ("F64", "F32", "F16", "BF16")


class Along(NamedTuple):
    """An axis of a stored tensor: `num` outputs (or inputs, or experts) of the matrix take `stored` places on it."""

    axis: Literal["items", "outputs", "inputs"]
    num: int = 1
    stored: int = 1


ITEMS, OUTPUTS, INPUTS = Along("items"), Along("outputs"), Along("inputs")


class Part(NamedTuple):
    """One of the stored tensors of a matrix."""

    name: str
    shape: Shape | None  # axes of size 1 do not count; None: any, checked when read
    dtypes: tuple[str, ...]  # one of them; safetensors' names
    is_optional: bool = False
    other_names: tuple[str, ...] = ()  # alternative names
    axes: tuple[Along | None, ...] = ()
    """The matrix's axis that each axis of `shape` follows; None: none. A tensor without any is read as a whole."""
    rows: Shape | None = None  # the shape that `axes` refers to, if the tensor is stored in another shape


LEAST_INPUT_GROUP = 32
"""Least number of rounded inputs that share a scale: as many as the kernels multiply at once."""


class Inputs(NamedTuple):
    """How the inputs of a product are rounded, like the kernels' `InputRounding`."""

    dtype: Literal["int8", "fp8_e4m3"]
    is_static: bool  # with a scale that is stored
    group: int | None = None  # inputs of a token that share a scale; None: all


class MatrixFormat(Protocol):
    """One way of storing a matrix, with its parameters."""

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        """Return the tensors stored for a weight, by role.

        Args:
            name: the weight's, such as "model.layers.0.mlp.up_proj.weight".
            shape: [N, K], or [E, N, K] for experts in one tensor, however it is stored.

        Raises:
            LoadError: a matrix of this shape cannot be stored in this format.
        """
        ...


def unit(format: MatrixFormat, axis: Literal["outputs", "inputs"]) -> int:
    """Return how many outputs or inputs share stored data: the matrix can only be split at multiples of this."""
    # The parts of an empty matrix have all axes.
    parts = format.parts("", (0, 0))
    return math.lcm(*(its.num for part in parts.values() for its in part.axes if its is not None and its.axis == axis))


class Quantization(Protocol):
    """The parsed `quantization_config`."""

    @property
    def name(self) -> str:
        """The usual name, with the variant."""
        ...

    def format_of(self, name: str) -> MatrixFormat | None:
        """Return the format of a weight, by the checkpoint's own name; None if it is stored as floats.

        A matrix that is actually stored as floats counts as floats anyway.
        """
        ...

    def ignores(self, name: str) -> bool:
        """Return whether a stored tensor that is no part of a matrix is known to be redundant."""
        ...


class QuantizationMethod(NamedTuple):
    """How one `quant_method` is parsed."""

    name: str
    parse: "Parse"


class Parse(Protocol):
    def __call__(self, fields: JsonFields) -> Quantization:
        """Parse quantization_config; raises ConfigError for what is not supported."""


def unsupported(found: str, supported: str) -> ConfigError:
    """Return the error for an unsupported variant."""
    return ConfigError(
        f"this checkpoint is quantized in a way that is not supported: {found}; supported: {supported}. "
        "Serve the one that it was made from, or quantize it again"
    )
