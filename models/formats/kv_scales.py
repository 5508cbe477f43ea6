"""Scales of keys and values in a checkpoint: their type, and the names of their tensors."""

from typing import Literal

from penstock.models.formats.format import unsupported
from penstock.models.parsing.json_fields import JsonFields

KVScaleType = Literal["fp8_e4m3", "int8"]
_TYPES: dict[tuple[str, int], KVScaleType] = {("float", 8): "fp8_e4m3", ("int", 8): "int8"}


def kv_scale_type(config: JsonFields) -> KVScaleType | None:
    """Return the type of KV for which config.json announces scales; None if it announces none.

    Raises:
        ConfigError: the scales are of an unsupported kind.
    """
    fields = config.object("quantization_config")
    if fields is None or fields.raw("kv_cache_scheme") is None:
        return None
    if fields.raw("kv_cache_scheme") == "static":  # AutoFP8's
        return "fp8_e4m3"
    scheme = fields.object("kv_cache_scheme")
    if scheme is None:
        return None
    kind = scheme.text("type", "int").lower(), scheme.whole("num_bits", 8)
    strategy, is_symmetric = scheme.text("strategy", "tensor").lower(), scheme.flag("symmetric", True)
    if kind not in _TYPES or not is_symmetric:
        found = f"KV in {kind[0]} of {kind[1]} bits{'' if is_symmetric else ', asymmetric'} (kv_cache_scheme)"
        raise unsupported(found, "FP8 and INT8, symmetric")
    # With other scales, each head of each token gets its own.
    return _TYPES[kind] if strategy == "tensor" and scheme.raw("dynamic") in (None, False) else None


def scale_names(attention: str, which: Literal["k", "v"]) -> tuple[str, ...]:
    """Return the names that tools use for the scale of an attention's keys or values."""
    projection = f"{attention}.{which}_proj"
    return (
        f"{attention}.{which}_scale",
        f"{projection}.{which}_scale",
        f"{projection}.output_scale",
        f"{attention}.kv_scale",
    )
