"""FP8 as DeepSeek and Qwen publish it, with a scale for each block of 128 x 128; and with one scale for a matrix."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.config.options import ConfigError
from penstock.models.formats.format import (
    FLOATS,
    INPUTS,
    ITEMS,
    OUTPUTS,
    Along,
    Inputs,
    Part,
    QuantizationMethod,
    Shape,
    unsupported,
)
from penstock.models.formats.modules import KeptModules, num_groups, stem_of
from penstock.models.parsing.json_fields import JsonFields

SUPPORTED = "FP8 (e4m3) with a scale for each block, or one for each matrix"
_POWERS_OF_TWO = ("F8_E8M0", "U8")  # scales that are powers of two, as exponents


class FP8Matrix(NamedTuple):
    """See `MatrixFormat`; what the tensors hold is in `gpu_worker/formats/fp8.py`."""

    block: tuple[int, int] | None  # outputs and inputs that share a scale; None: all
    inputs: Inputs

    def parts(self, name: str, shape: Shape) -> Mapping[str, Part]:
        *experts, num_outputs, num_inputs = shape
        items = (ITEMS,) * len(experts)
        scales, of_scales = tuple(experts), items
        others: tuple[str, ...] = (f"{name}_scale",)  # AutoFP8's
        if self.block is not None:
            scales = (*experts, num_groups(num_outputs, self.block[0]), num_groups(num_inputs, self.block[1]))
            of_scales = (*items, Along("outputs", self.block[0]), Along("inputs", self.block[1]))
            others = ()
        dtypes = (*FLOATS, *_POWERS_OF_TWO)
        weight = {
            "codes": Part(name, shape, ("F8_E4M3",), axes=(*items, OUTPUTS, INPUTS)),
            "scales": Part(f"{name}_scale_inv", scales, dtypes, other_names=others, axes=of_scales),
        }
        if self.inputs.is_static:
            stem, scale = stem_of(name), tuple(experts)
            others = (f"{stem}.input_scale",)
            weight["input_scale"] = Part(f"{stem}.activation_scale", scale, FLOATS, other_names=others, axes=items)
        return weight


class FP8(NamedTuple):
    """See `Quantization`."""

    matrix: FP8Matrix
    kept: KeptModules

    @property
    def name(self) -> str:
        block = self.matrix.block
        return "FP8" if block is None else f"FP8 in blocks of {block[0]} x {block[1]}"

    def format_of(self, name: str) -> FP8Matrix | None:
        return None if stem_of(name) in self.kept else self.matrix

    def ignores(self, name: str) -> bool:
        return name.endswith((".k_scale", ".v_scale", ".kv_scale", ".input_scale", ".output_scale"))


def parse(fields: JsonFields) -> FP8:
    """As `Parse`."""
    if (kind := fields.text("fmt", "e4m3").lower()) not in ("e4m3", "float8_e4m3fn"):
        raise unsupported(f"FP8 of the type {kind}", SUPPORTED)
    if (experts := fields.text("expert_dtype", "fp8")) != "fp8":
        raise unsupported(f"FP8 with experts in {experts}", SUPPORTED)
    scheme = fields.text("activation_scheme", "dynamic").lower()
    if scheme not in ("dynamic", "static"):
        raise unsupported(f"FP8 with the activation scheme {scheme}", SUPPORTED)
    sizes = fields.wholes("weight_block_size")
    if fields.raw("weight_block_size") is not None and (len(sizes) != 2 or 0 in sizes):
        raise ConfigError(f"quantization_config: weight_block_size must be two positive integers, got {sizes}")
    block = (sizes[0], sizes[1]) if sizes else None
    if block is not None and scheme == "static":
        raise unsupported("FP8 in blocks with static scales of inputs", SUPPORTED)
    kept = fields.texts("modules_to_not_convert") or fields.texts("ignored_layers")
    inputs = Inputs("fp8_e4m3", scheme == "static", None if block is None else block[1])
    return FP8(FP8Matrix(block, inputs), KeptModules(["lm_head"] if kept is None else kept))


FP8_METHOD = QuantizationMethod("fp8", parse)
