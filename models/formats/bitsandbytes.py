"""bitsandbytes: NF4 and FP4 in blocks, with or without quantized scales; INT8 with a scale for each output."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.models.formats.format import INPUTS, OUTPUTS, Along, Part, QuantizationMethod, Shape, unsupported
from penstock.models.formats.modules import KeptModules, stem_of
from penstock.models.parsing.json_fields import JsonFields

SUPPORTED = "bitsandbytes in 4 bits (nf4, fp4) stored as uint8, and in 8 bits (LLM.int8)"
_KINDS = ("nf4", "fp4")


class BlocksMatrix(NamedTuple):
    """A matrix of 4 bits; see `MatrixFormat`. What the tensors hold is in `gpu_worker/formats/bitsandbytes.py`."""

    kind: str  # "nf4" or "fp4"
    is_nested: bool  # whether scales are quantized, too

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        num_outputs, num_inputs = shape
        # The block size is in the state, a JSON object.
        codes = Part(name, (-(-num_outputs * num_inputs // 2), 1), ("U8",))
        if num_inputs % 2 == 0:  # then rows are whole bytes
            codes = codes._replace(rows=(num_outputs, num_inputs // 2), axes=(OUTPUTS, Along("inputs", 2)))
        parts = {
            "codes": codes,
            "scales": Part(f"{name}.absmax", None, ("U8",) if self.is_nested else ("F32",)),
            "values": Part(f"{name}.quant_map", (16,), ("F32",)),
            "state": Part(f"{name}.quant_state.bitsandbytes__{self.kind}", None, ("U8",)),
        }
        if self.is_nested:
            parts["super_scales"] = Part(f"{name}.nested_absmax", None, ("F32",))
            parts["scale_values"] = Part(f"{name}.nested_quant_map", (256,), ("F32",))
        return parts


class Int8Matrix(NamedTuple):
    """A matrix of 8 bits; see `MatrixFormat`."""

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        stem = stem_of(name)
        return {
            "codes": Part(name, shape, ("I8",), axes=(OUTPUTS, INPUTS)),
            "scales": Part(f"{stem}.SCB", shape[:1], ("F32",), axes=(OUTPUTS,)),
            "layout": Part(f"{stem}.weight_format", (), ("U8",), is_optional=True),
        }


class BitsAndBytes(NamedTuple):
    """See `Quantization`."""

    matrix: BlocksMatrix | Int8Matrix
    kept: KeptModules

    @property
    def name(self) -> str:
        its = self.matrix
        return "bitsandbytes INT8" if isinstance(its, Int8Matrix) else f"bitsandbytes {its.kind.upper()}"

    def format_of(self, name: str) -> BlocksMatrix | Int8Matrix | None:
        return None if stem_of(name) in self.kept else self.matrix

    def ignores(self, name: str) -> bool:
        return False


def parse(fields: JsonFields) -> BitsAndBytes:
    """As `Parse`."""
    # Old files have only these fields with an underscore.
    is_4_bits = fields.flag("load_in_4bit") or fields.flag("_load_in_4bit")
    is_8_bits = fields.flag("load_in_8bit") or fields.flag("_load_in_8bit")
    if is_4_bits == is_8_bits:
        raise unsupported("bitsandbytes with neither or both of load_in_4bit and load_in_8bit", SUPPORTED)
    skipped = fields.texts("llm_int8_skip_modules")
    kept = KeptModules(["lm_head"] if skipped is None else skipped)
    if is_8_bits:
        return BitsAndBytes(Int8Matrix(), kept)
    kind = fields.text("bnb_4bit_quant_type", "fp4").lower()
    if kind not in _KINDS:
        raise unsupported(f"bitsandbytes of the type {kind}", SUPPORTED)
    if (storage := fields.text("bnb_4bit_quant_storage", "uint8").removeprefix("torch.")) != "uint8":
        raise unsupported(f"bitsandbytes stored as {storage}", SUPPORTED)
    return BitsAndBytes(BlocksMatrix(kind, fields.flag("bnb_4bit_use_double_quant")), kept)


BITSANDBYTES_METHOD = QuantizationMethod("bitsandbytes", parse)
