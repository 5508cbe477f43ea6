"""From config.json to the vision tower of a model that takes images; of others the text part is served."""

from collections.abc import Mapping

from penstock.core.checkpoint.parsing.json_fields import JsonFields
from penstock.core.checkpoint.vision import Vision, VisionActivation
from penstock.core.config.options import ConfigError

_MAX_LAYERS = 1024
_ACTIVATIONS: Mapping[str, VisionActivation] = {
    "silu": "silu",
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_QWEN2, _QWEN2_5 = "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"


def parse_vision(architecture: str, fields: JsonFields, out_size: int) -> Vision | None:
    """The tower that makes vectors of `out_size` numbers; None if this model is served without its own.

    Raises:
        ConfigError: for a setting that is not supported.
    """
    if architecture not in (_QWEN2, _QWEN2_5):
        return None
    its = fields.object("vision_config") or JsonFields("config.json: vision_config", {})
    is_first = architecture == _QWEN2
    name = its.text("hidden_act", "quick_gelu" if is_first else "silu")
    if name not in _ACTIVATIONS:
        raise ConfigError(f"config.json: vision_config: hidden_act {name[:64]!r} is not supported")
    hidden = its.whole("embed_dim", 1280) if is_first else its.whole("hidden_size", 3584)
    heads, patch, merge = its.whole("num_heads", 16), its.whole("patch_size", 14), its.whole("spatial_merge_size", 2)
    if hidden % heads or hidden // heads % 4:
        raise ConfigError(f"config.json: vision_config: {hidden} numbers are not {heads} heads of a multiple of 4")
    depth = its.whole("depth", 32, most=_MAX_LAYERS)
    made = its.whole("hidden_size" if is_first else "out_hidden_size", 3584)
    if made != out_size:
        raise ConfigError(
            f"config.json: the vision tower makes vectors of {made} numbers, but the text part has {out_size}"
        )
    channels = its.whole("in_channels", its.whole("in_chans", 3))
    rotary = its.object("rope_parameters") or JsonFields("config.json: vision_config: rope_parameters", {})
    return Vision(
        image_token=fields.whole("image_token_id", 151655, least=0),
        patch_shape=(channels, its.whole("temporal_patch_size", 2), patch, patch),
        hidden_size=hidden,
        num_layers=depth,
        num_heads=heads,
        mlp_size=int(hidden * its.number("mlp_ratio", 4.0)) if is_first else its.whole("intermediate_size", 3420),
        mlp_is_gated=not is_first,
        activation=_ACTIVATIONS[name],
        norm="layer" if is_first else "rms",
        theta=rotary.number("rope_theta", 10000.0),
        merge=merge,
        out_size=out_size,
        window=0 if is_first else its.whole("window_size", 112) // merge // patch,
        whole_layers=()
        if is_first
        else tuple(its.wholes("fullatt_block_indexes") if its.has("fullatt_block_indexes") else (7, 15, 23, 31)),
    )
