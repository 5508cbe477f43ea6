"""AWQ, as AutoAWQ writes it: 4-bit codes of groups of inputs, packed along the outputs, eight in a word."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.config.options import ConfigError
from penstock.models.files.source import LoadError
from penstock.models.formats.format import (
    FLOATS,
    INPUTS,
    OUTPUTS,
    Along,
    Part,
    QuantizationMethod,
    Shape,
    unsupported,
)
from penstock.models.formats.modules import KeptModules, along_groups, num_groups, num_words, stem_of
from penstock.models.parsing.json_fields import JsonFields

SUPPORTED = "AWQ of 4 bits in the layout gemm"
_BITS = 4


class AWQMatrix(NamedTuple):
    """See `MatrixFormat`; what the tensors hold is in `gpu_worker/formats/awq.py`."""

    group_size: int | None  # inputs that share a scale; None: all

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        num_outputs, num_inputs = shape
        if num_outputs % 8:
            raise LoadError(f"{name} has {num_outputs} outputs, but AWQ packs eight together")
        stem, groups, words = stem_of(name), num_groups(num_inputs, self.group_size), num_words(num_outputs, _BITS)
        of_groups, of_words = along_groups("inputs", self.group_size), Along("outputs", 8)
        return {
            "codes": Part(f"{stem}.qweight", (num_inputs, words), ("I32",), axes=(INPUTS, of_words)),
            "zeros": Part(f"{stem}.qzeros", (groups, words), ("I32",), axes=(of_groups, of_words)),
            "scales": Part(f"{stem}.scales", (groups, num_outputs), FLOATS, axes=(of_groups, OUTPUTS)),
        }


class AWQ(NamedTuple):
    """See `Quantization`."""

    matrix: AWQMatrix
    kept: KeptModules

    @property
    def name(self) -> str:
        return f"AWQ, {_BITS} bits"

    def format_of(self, name: str) -> AWQMatrix | None:
        return None if stem_of(name) in self.kept else self.matrix

    def ignores(self, name: str) -> bool:
        return False


def parse(fields: JsonFields) -> AWQ:
    """As `Parse`; older files use other names for some fields."""
    layout = (fields.text("version") or fields.text("format", "gemm")).lower()
    if fields.text("backend") == "llm-awq":
        layout = "llm-awq"
    if layout != "gemm":
        raise unsupported(f"AWQ in the layout {layout}", SUPPORTED)
    bits = fields.whole("bits", fields.whole("w_bit", _BITS))
    if bits != _BITS:
        raise unsupported(f"AWQ of {bits} bits", SUPPORTED)
    size = fields.whole("group_size", fields.whole("q_group_size", 128, least=-1), least=-1)
    if size == 0:
        raise ConfigError("quantization_config: group_size must be -1 or a positive integer, got 0")
    kept = fields.texts("modules_to_not_convert")
    return AWQ(AWQMatrix(None if size == -1 else size), KeptModules(["lm_head", *(kept or [])]))


AWQ_METHOD = QuantizationMethod("awq", parse)
