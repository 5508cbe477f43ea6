"""Parses the vision tower of a Qwen-VL model from config.json."""

from typing import TypedDict

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.vision.fields import MAX_LAYERS, activation
from penstock.models.vision.grid import GridVision, VisionNames


class _Grid(TypedDict):
    """The fields of all Qwen-VL towers."""

    image_token: int
    patch_shape: tuple[int, ...]
    num_layers: int
    merge: int
    theta: float


class _Heads(TypedDict):
    hidden_size: int
    num_heads: int


def _grid(fields: JsonFields, its: JsonFields, *, patch: int = 14, depth: int = 32, token: int = 151655) -> _Grid:
    size = its.whole("patch_size", patch)
    channels = its.whole("in_channels", its.whole("in_chans", 3))
    rotary = its.object("rope_parameters") or JsonFields("config.json: vision_config: rope_parameters", {})
    return {
        "image_token": fields.whole("image_token_id", token, least=0),
        "patch_shape": (channels, its.whole("temporal_patch_size", 2), size, size),
        "num_layers": its.whole("depth", depth, most=MAX_LAYERS),
        "merge": its.whole("spatial_merge_size", 2),
        "theta": rotary.number("rope_theta", 10000.0),
    }


def _heads(hidden: int, its: JsonFields) -> _Heads:
    heads = its.whole("num_heads", 16)
    if hidden % heads or hidden // heads % 4:
        raise ConfigError(f"config.json: vision_config: {hidden} numbers are not {heads} heads of a multiple of 4")
    return {"hidden_size": hidden, "num_heads": heads}


def _out_size(made: int, text: Decoder) -> int:
    if made != text.hidden_size:
        raise ConfigError(
            f"config.json: the vision tower makes vectors of {made} numbers, but the text part has {text.hidden_size}"
        )
    return made


def qwen2(fields: JsonFields, its: JsonFields, text: Decoder) -> GridVision:
    """Qwen2-VL."""
    hidden = its.whole("embed_dim", 1280)
    return GridVision(
        **_grid(fields, its),
        **_heads(hidden, its),
        out_size=_out_size(its.whole("hidden_size", 3584), text),
        mlp_size=int(hidden * its.number("mlp_ratio", 4.0)),
        activation=activation(its, "hidden_act", "quick_gelu"),
        norm="layer",
        names=VisionNames(mlp=("mlp.fc1", "mlp.fc2")),
    )


def qwen2_5(fields: JsonFields, its: JsonFields, text: Decoder) -> GridVision:
    """Qwen2.5-VL."""
    grid = _grid(fields, its)
    whole = its.wholes("fullatt_block_indexes") if its.has("fullatt_block_indexes") else (7, 15, 23, 31)
    return GridVision(
        **grid,
        **_heads(its.whole("hidden_size", 3584), its),
        out_size=_out_size(its.whole("out_hidden_size", 3584), text),
        mlp_size=its.whole("intermediate_size", 3420),
        activation=activation(its, "hidden_act", "silu"),
        norm="rms",
        window=its.whole("window_size", 112) // grid["merge"] // grid["patch_shape"][-1],
        whole_layers=tuple(whole),
        names=VisionNames(mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
    )


def qwen3(fields: JsonFields, its: JsonFields, text: Decoder) -> GridVision:
    """Qwen3-VL."""
    depth = its.whole("depth", 27, most=MAX_LAYERS)
    given = its.has("deepstack_visual_indexes")
    deep = tuple(its.wholes("deepstack_visual_indexes")) if given else (8, 16, 24)
    if len(set(deep)) != len(deep) or sorted(deep) != list(deep) or not all(0 <= layer < depth for layer in deep):
        raise ConfigError("config.json: vision_config: deepstack_visual_indexes must be layers of it, ascending")
    if len(deep) >= len(text.layers):
        raise ConfigError("config.json: vision_config: deepstack_visual_indexes are more than the text part has layers")
    return _with_positions(fields, its, text, deep)


def qwen3_5(fields: JsonFields, its: JsonFields, text: Decoder) -> GridVision:
    """Qwen3.5: the tower of Qwen3-VL, all of whose embeddings go in before the first layer."""
    return _with_positions(fields, its, text, (), token=248056)


def _with_positions(
    fields: JsonFields, its: JsonFields, text: Decoder, deep: tuple[int, ...], *, token: int = 151655
) -> GridVision:
    """Return a tower with learned positions; `token`: the usual image token."""
    count = its.whole("num_position_embeddings", 2304)
    side = round(count**0.5)
    if side * side != count:
        raise ConfigError(f"config.json: vision_config: num_position_embeddings {count} is not a square")
    return GridVision(
        **_grid(fields, its, patch=16, depth=27, token=token),
        **_heads(its.whole("hidden_size", 1152), its),
        out_size=_out_size(its.whole("out_hidden_size", 3584), text),
        patch_bias=True,
        mlp_size=its.whole("intermediate_size", 4304),
        activation=activation(its, "hidden_act", "gelu_pytorch_tanh"),
        norm="layer",
        positions=side,
        deep_layers=deep,
        names=VisionNames(mlp=("mlp.linear_fc1", "mlp.linear_fc2"), merger=("norm", "linear_fc1", "linear_fc2")),
    )
