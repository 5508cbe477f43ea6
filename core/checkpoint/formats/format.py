"""The interface of a quantized checkpoint: which matrices are stored in which way, and as which tensors.

`quantization_config` in config.json is parsed into a `Quantization` (`registry.py`), which knows the format of each
matrix. What the stored tensors mean is known to the file of the same name in `gpu_worker/formats/`.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from penstock.core.checkpoint.parsing.json_fields import JsonFields
from penstock.core.config.options import ConfigError

Shape = tuple[int, ...]
FLOATS = ("F64", "F32", "F16", "BF16")


class Along(NamedTuple):
    """An axis of a stored tensor: `num` outputs (or inputs, or experts) of the matrix have `stored` places there."""

    axis: Literal["items", "outputs", "inputs"]
    num: int = 1
    stored: int = 1


ITEMS, OUTPUTS, INPUTS = Along("items"), Along("outputs"), Along("inputs")


class Part(NamedTuple):
    """A stored tensor of a matrix."""

    name: str
    shape: Shape | None  # axes of size 1 do not count; None: any, and checked when it is read
    dtypes: tuple[str, ...]  # one of them; safetensors' names
    is_optional: bool = False
    other_names: tuple[str, ...] = ()  # that it may have instead
    axes: tuple[Along | None, ...] = ()
    """What each axis of `shape` goes along; None: nothing. A tensor without any is read as a whole."""
    rows: Shape | None = None  # the axes that `axes` has, if it is stored as another shape


LEAST_INPUT_GROUP = 32
"""Inputs that share a scale when they are rounded, at least: as many as the kernels multiply at once."""


class Inputs(NamedTuple):
    """How the inputs of a product are rounded, as `InputRounding` of the kernels."""

    dtype: Literal["int8", "fp8_e4m3"]
    is_static: bool  # with a scale that is stored
    group: int | None = None  # inputs of a token that share a scale; None: all


class MatrixFormat(Protocol):
    """One way of storing a matrix, with its variables."""

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        """What is stored for a weight, by its role there.

        Args:
            name: of the weight, "model.layers.0.mlp.up_proj.weight".
            shape: [N, K], for experts in one tensor [E, N, K], however it is stored.

        Raises:
            LoadError: a matrix of this shape cannot be stored so.
        """
        ...


def unit(format: MatrixFormat, axis: Literal["outputs", "inputs"]) -> int:
    """How many outputs or inputs share something that is stored: parts of the matrix begin and end at multiples."""
    # What is stored of a matrix without inputs has all axes.
    parts = format.parts("", (0, 0))
    return math.lcm(*(its.num for part in parts.values() for its in part.axes if its is not None and its.axis == axis))


class Quantization(Protocol):
    """What `quantization_config` says."""

    @property
    def name(self) -> str:
        """As people call it, with its variant."""
        ...

    def format_of(self, name: str) -> MatrixFormat | None:
        """The format of a weight, by the checkpoint's own name for it; None if it is stored as floats.

        A matrix that is there as floats counts as such anyway.
        """
        ...

    def ignores(self, name: str) -> bool:
        """Whether a stored tensor that is no part of a matrix is known to be redundant."""
        ...


class QuantizationMethod(NamedTuple):
    """How one `quant_method` is parsed."""

    name: str
    parse: "Parse"


class Parse(Protocol):
    def __call__(self, fields: JsonFields) -> Quantization:
        """Parse quantization_config; raises ConfigError for what is not supported."""


def unsupported(found: str, supported: str) -> ConfigError:
    """The error for a variant that cannot be read."""
    return ConfigError(
        f"this checkpoint is quantized in a way that is not supported: {found}; supported: {supported}. "
        "Serve the one that it was made from, or quantize it again"
    )
