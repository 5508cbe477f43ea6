"""The matrices of GGUF files, each in blocks of its own type.

Such a file has no config.json. The one made from its metadata (`models/gguf/`) has the type of each quantized
matrix in quantization_config.
"""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.models.formats.format import ITEMS, OUTPUTS, Along, Part, QuantizationMethod, Shape
from penstock.models.gguf.block_types import BLOCK_TYPES
from penstock.models.parsing.json_fields import JsonFields


class GGUFBlocks(NamedTuple):
    """See `MatrixFormat`."""

    block_type: str  # "Q4_K"

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        # Rows are read as bytes.
        block = BLOCK_TYPES[self.block_type]
        axes = (*(ITEMS,) * len(shape[:-2]), OUTPUTS, Along("inputs", block.num_elements, block.num_bytes))
        return {"blocks": Part(name, shape, (self.block_type,), axes=axes)}


class GGUF:
    """See `Quantization`."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types  # of the blocks of each quantized matrix

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GGUF) and self.types == other.types

    def __hash__(self) -> int:
        return hash(frozenset(self.types.items()))

    @property
    def name(self) -> str:
        return f"GGUF, {', '.join(sorted(set(self.types.values())))}"

    def format_of(self, name: str) -> GGUFBlocks | None:
        block_type = self.types.get(name)
        return None if block_type is None else GGUFBlocks(block_type)

    def ignores(self, name: str) -> bool:
        return False


def parse(fields: JsonFields) -> GGUF:
    """As `Parse`."""
    types = fields.object("types")
    return GGUF({} if types is None else {name: types.text(name) for name in types.names()})


GGUF_METHOD = QuantizationMethod("gguf", parse)
