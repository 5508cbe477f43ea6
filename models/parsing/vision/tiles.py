"""Parses the vision tower of a model that takes images of one size, or tiles of that size, from config.json."""

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.vision.fields import MAX_LAYERS, activation, features, projector
from penstock.models.vision.tiles import TilePool, TileSquares, TileVision
from penstock.models.vision.views import OneTile, TilesThenWhole, WholeThenTiles

_SIGLIP = {"mlp": 3072, "depth": 12, "act": "gelu_pytorch_tanh"}
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {"patch": 32, "hidden": 768, "mlp": 3072, "depth": 12, "heads": 12, "act": "quick_gelu"},
    "siglip_vision_model": {**_SIGLIP, "patch": 16, "hidden": 768, "heads": 12},
    "idefics3_vision": {**_SIGLIP, "patch": 32, "hidden": 1152, "heads": 16},
}
"""Defaults of towers for fields that their configurations leave out."""
_USUAL_RESOLUTIONS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_MAX_TILES = 64  # per side
_OF_LLAVA = {"patch_size": 14, "image_size": 336, "hidden_size": 1024, "intermediate_size": 4096}
_OF_LLAVA |= {"num_hidden_layers": 24, "num_attention_heads": 16}


def llava(fields: JsonFields, its: JsonFields, text: Decoder) -> TileVision | None:
    """LLaVA 1.5 and similar models; None for another kind of tower."""
    kind = its.text("model_type", "clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        return None
    if not its.has("model_type") and not its.names():
        its = its.with_fields(_OF_LLAVA)
    depth = its.whole("num_hidden_layers", _KINDS[kind]["depth"], most=MAX_LAYERS)
    strategy = fields.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ConfigError(f"config.json: vision_feature_select_strategy {strategy[:64]!r} is not supported")
    return _tower(
        fields,
        its,
        kind,
        drops_first=strategy == "default",
        features=features(fields, depth, usual=-2),
        out_size=text.hidden_size,
        made=projector(fields, has_bias=True),
    )


def llava_next(fields: JsonFields, its: JsonFields, text: Decoder) -> TileVision | None:
    """LLaVA-NeXT: it gets the whole image, and tiles of it."""
    one = llava(fields, its, text)
    if one is None:
        return None
    if one.drops_first != one.has_class:
        raise ConfigError("config.json: vision_feature_select_strategy does not fit the tower: tiles need all patches")
    said = fields.raw("image_grid_pinpoints")
    said = _USUAL_RESOLUTIONS if said is None else said
    if not isinstance(said, list) or not said or not all(_is_in_tiles(each, one.tile) for each in said):
        raise ConfigError(f"config.json: image_grid_pinpoints must be sizes of whole tiles of {one.tile} pixels")
    resolutions = tuple((rows, columns) for rows, columns in said)
    return replace(one, views=WholeThenTiles(one.tile, one.tile // one.patch, resolutions))


def idefics3(fields: JsonFields, its: JsonFields, text: Decoder) -> TileVision:
    """Idefics3 and SmolVLM."""
    square = fields.whole("scale_factor", 2)
    made = _whole_tower(
        *(fields, its, text, "idefics3_vision"),
        usual_token=128257,
        made=TileSquares(square=square),
        views=TilesThenWhole(),
        shares_positions=True,
    )
    if made.tile // made.patch % square:
        raise ConfigError(f"config.json: scale_factor {square} does not divide {made.num_patches} patches into squares")
    return made


def gemma3(fields: JsonFields, its: JsonFields, text: Decoder) -> TileVision:
    """Gemma 3."""
    count = fields.whole("mm_tokens_per_image", 256)
    side = math.isqrt(count)
    made = _whole_tower(
        *(fields, its, text, "siglip_vision_model"),
        usual_token=262144,
        made=TilePool(side=side),
        views=OneTile((0,)),
        is_whole=True,
    )
    if side * side != count or made.tile // made.patch % side:
        raise ConfigError(f"config.json: mm_tokens_per_image {count} does not divide {made.num_patches} patches evenly")
    return made


def _is_in_tiles(said: Any, tile: int) -> bool:
    if not isinstance(said, list) or len(said) != 2:
        return False
    return all(type(size) is int and 0 < size <= _MAX_TILES * tile and size % tile == 0 for size in said)


def _whole_tower(fields: JsonFields, its: JsonFields, text: Decoder, kind: str, **others: Any) -> TileVision:
    """Return a tower that uses all layers, and the norm after them."""
    depth = its.whole("num_hidden_layers", _KINDS[kind]["depth"], most=MAX_LAYERS)
    others |= {"drops_first": False, "has_last_norm": True}
    return _tower(fields, its, kind, features=(depth,), out_size=text.hidden_size, **others)


def _tower(
    fields: JsonFields,
    its: JsonFields,
    kind: str,
    *,
    features: tuple[int, ...],
    usual_token: int = 32000,
    **others: Any,
) -> TileVision:
    """Return a tower of this kind; `others`: fields that do not follow from its own configuration."""
    usual = _KINDS[kind]
    hidden, heads = its.whole("hidden_size", usual["hidden"]), its.whole("num_attention_heads", usual["heads"])
    tile, patch = its.whole("image_size", 224), its.whole("patch_size", usual["patch"])
    if hidden % heads:
        raise ConfigError(f"config.json: vision_config: {hidden} numbers are not {heads} heads")
    if patch > tile:
        raise ConfigError(f"config.json: vision_config: patches of {patch} pixels in images of {tile}")
    others.setdefault("views", OneTile((tile, tile)))
    return TileVision(
        image_token=fields.whole("image_token_index", fields.whole("image_token_id", usual_token, least=0), least=0),
        tile=tile,
        patch=patch,
        num_channels=its.whole("num_channels", 3),
        hidden_size=hidden,
        num_layers=max(features),
        num_heads=heads,
        mlp_size=its.whole("intermediate_size", usual["mlp"]),
        activation=activation(its, "hidden_act", usual["act"]),
        norm_eps=its.number("layer_norm_eps", 1e-5 if kind == "clip_vision_model" else 1e-6),
        has_class=kind == "clip_vision_model",
        features=features,
        **others,
    )
