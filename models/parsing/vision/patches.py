"""Parses the vision tower of Pixtral and Mistral 3 from config.json."""

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.vision.fields import MAX_LAYERS, activation, features, projector
from penstock.models.vision.patches import PatchVision, SquareMerge

KIND = "pixtral"


def pixtral(fields: JsonFields, its: JsonFields, text: Decoder) -> PatchVision:
    """Pixtral's tower, followed by LLaVA's projector."""
    return _patches(fields, its, text, usual_token=32000, usual_feature=-2, has_bias=True)


def mistral3(fields: JsonFields, its: JsonFields, text: Decoder) -> PatchVision | None:
    """Pixtral's tower, followed by Mistral 3's projector, which merges neighbours; None for another kind of tower."""
    if its.text("model_type", KIND) != KIND:
        return None
    of_text = fields.object("text_config") or fields
    merge = SquareMerge(square=fields.whole("spatial_merge_size", 2), norm_eps=of_text.number("rms_norm_eps", 1e-6))
    return _patches(fields, its, text, usual_token=10, usual_feature=-1, has_bias=False, merge=merge)


def _patches(
    fields: JsonFields,
    its: JsonFields,
    text: Decoder,
    *,
    usual_token: int,
    usual_feature: int,
    has_bias: bool,
    merge: SquareMerge | None = None,
) -> PatchVision:
    hidden, heads = its.whole("hidden_size", 1024), its.whole("num_attention_heads", 16)
    if hidden % heads or hidden // heads % 4:
        raise ConfigError(f"config.json: vision_config: {hidden} numbers are not {heads} heads of a multiple of 4")
    taken = features(fields, its.whole("num_hidden_layers", 24, most=MAX_LAYERS), usual=usual_feature)
    if merge is not None and len(taken) > 1:
        raise ConfigError("config.json: vision_feature_layer must be one layer where neighbours are merged")
    rotary = its.object("rope_parameters") or its
    return PatchVision(
        image_token=fields.whole("image_token_index", fields.whole("image_token_id", usual_token, least=0), least=0),
        patch=its.whole("patch_size", 16),
        num_channels=its.whole("num_channels", 3),
        hidden_size=hidden,
        num_layers=max(taken),
        num_heads=heads,
        mlp_size=its.whole("intermediate_size", 4096),
        activation=activation(its, "hidden_act", "gelu"),
        theta=rotary.number("rope_theta", 10000.0),
        features=taken,
        merge=merge,
        made=projector(fields, has_bias=has_bias),
        out_size=text.hidden_size,
    )
