"""Parses the vision tower of a model that takes images; for unsupported towers only the text part is served."""

from collections.abc import Callable, Mapping

from penstock.models.description.decoder import Decoder
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.vision.foreign import FOREIGN, foreign, scales_embeddings
from penstock.models.parsing.vision.grid import qwen2, qwen2_5, qwen3, qwen3_5
from penstock.models.parsing.vision.patches import KIND, mistral3, pixtral
from penstock.models.parsing.vision.tiles import gemma3, idefics3, llava, llava_next
from penstock.models.vision.kinds import Vision
from penstock.models.vision.patches import PatchVision
from penstock.models.vision.tiles import TileVision


def parse_vision(architecture: str, fields: JsonFields, text: Decoder) -> Vision | None:
    """Return the tower that makes vectors for this text part; None if the model is served without a tower.

    Raises:
        ConfigError: for an unsupported setting.
    """
    parse, made = TOWERS.get(architecture), None
    if parse is not None and not scales_embeddings(text):
        made = parse(fields, fields.object("vision_config") or JsonFields("config.json: vision_config", {}), text)
    return foreign(architecture, fields, text) if made is None and architecture in FOREIGN else made


def _llava(fields: JsonFields, its: JsonFields, text: Decoder) -> TileVision | PatchVision | None:
    return pixtral(fields, its, text) if its.text("model_type") == KIND else llava(fields, its, text)


TOWERS: Mapping[str, Callable[[JsonFields, JsonFields, Decoder], Vision | None]] = {
    "Gemma3ForConditionalGeneration": gemma3,
    "Idefics3ForConditionalGeneration": idefics3,
    "LlavaForConditionalGeneration": _llava,
    "LlavaNextForConditionalGeneration": llava_next,
    "Mistral3ForConditionalGeneration": mistral3,
    "Qwen2VLForConditionalGeneration": qwen2,
    "Qwen2_5_VLForConditionalGeneration": qwen2_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5,
    "Qwen3VLForConditionalGeneration": qwen3,
    "Qwen3VLMoeForConditionalGeneration": qwen3,
    "SmolVLMForConditionalGeneration": idefics3,
}
"""By architecture, what parses the tower that our own code computes."""
