"""The `quantization_config` in config.json for checkpoints that are quantized here, in compressed-tensors' form."""

from collections.abc import Sequence
from typing import Any

from penstock.models.formats.made import MadeFormat, Recipe

_LAYOUTS: dict[MadeFormat, str] = {
    "int8": "int-quantized",
    "int8_weight_only": "pack-quantized",
    "int4": "pack-quantized",
    "fp8": "float-quantized",
}


def quantization_config(body: Recipe, head: Recipe | None, head_module: str, ignored: Sequence[str]) -> dict[str, Any]:
    """The object that transformers, vLLM and others read.

    Args:
        body: of all products but the head.
        head: of the head; None: it is one of the ignored modules.
        head_module: its name.
        ignored: modules that stay floats.
    """
    groups = {"group_0": _scheme(body, ["Linear"])}
    if head is not None and head.format != body.format:
        groups["group_1"] = _scheme(head, [head_module])
    layouts = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _scheme(recipe: Recipe, targets: list[str]) -> dict[str, Any]:
    is_int4, kind = recipe.format == "int4", "float" if recipe.format == "fp8" else "int"
    weights = {
        "num_bits": 4 if is_int4 else 8,
        "type": kind,
        "symmetric": not (is_int4 and recipe.has_zeros),
        "strategy": "group" if is_int4 else "channel",
        "group_size": recipe.group if is_int4 else None,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs if recipe.format in ("int8", "fp8") else None,
        "output_activations": None,
        "format": _LAYOUTS[recipe.format],
    }
