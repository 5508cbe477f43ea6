"""Formats into which float matrices can be quantized, at load or by `penstock quantize`. Nothing here needs torch."""

from typing import Literal, NamedTuple, get_args

from penstock.models.formats.format import MatrixFormat

MadeFormat = Literal["int8", "int8_weight_only", "int4", "fp8"]
MADE_FORMATS: tuple[MadeFormat, ...] = get_args(MadeFormat)

GROUP_SIZES = (32, 64, 128)
LEAST_WEIGHTS = 1 << 10
"""Matrices with fewer weights are not quantized: nothing would be gained."""


class Recipe(NamedTuple):
    """How a float matrix is quantized.

    int8              codes of 8 bits and a scale for each output; inputs are rounded to 8 bits, token by token
    int8_weight_only  the same weights; inputs are not rounded
    int4              codes of 4 bits; a scale for each group of inputs, and optionally a zero point
    fp8               e4m3 and a scale for each output; inputs are rounded to e4m3, token by token
    """

    format: MadeFormat
    group: int = 32  # for int4: consecutive inputs that share a scale, one of GROUP_SIZES
    has_zeros: bool = True  # for int4: a tenth less error for a quarter of a bit


class MadeAtLoad(NamedTuple):
    """See `Quantization`. The checkpoint has floats; its matrices are quantized as they are read."""

    body: Recipe
    head: Recipe

    @property
    def name(self) -> str:
        return f"{self.body.format}, made at load"

    def format_of(self, name: str) -> MatrixFormat | None:
        return None

    def ignores(self, name: str) -> bool:
        return False


HEAD = Recipe("int8_weight_only")
"""The recipe of the output matrix, whatever the others have. In 4 bits it would lose more than all others together.
Rounded inputs could swap the order of two likely tokens, and would not make steps faster."""


def at_load(format: MadeFormat) -> MadeAtLoad:
    """Return the quantization that an option asks for."""
    return MadeAtLoad(Recipe(format), HEAD)
