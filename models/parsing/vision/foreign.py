"""Architectures whose vision tower `transformers`' code computes, and why those that are left take texts only."""

from collections.abc import Mapping

from penstock.models.description.decoder import Decoder
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.vision.foreign import Foreign, ForeignVision

_AS_TOKENS = "its images are tokens, not embeddings"
_BY_TEXT = "what it sees of an image depends on the text beside it"
_CROSS = "layers of its decoder look at images beside the texts"
_ENCODER = "it is an encoder and a decoder"
_TIMM = "its vision tower comes from the library timm"
_MERGE = ("spatial_merge_size", 2)

FOREIGN: Mapping[str, Foreign] = {
    "AyaVisionForConditionalGeneration": Foreign(image_token=("image_token_index", 255036), mark="<image>"),
    "Cohere2VisionForConditionalGeneration": Foreign(image_token=("image_token_id", 255036), needs_torchvision=True),
    "Kimi_K25ForConditionalGeneration": Foreign(image_token=("image_token_id", 163605), needs_torchvision=True),
    "Lfm2VlForConditionalGeneration": Foreign(image_token=("image_token_id", 396), needs_torchvision=True),
    "Llama4ForConditionalGeneration": Foreign(
        image_token=("image_token_index", 200092), mark="<|image|>", needs_torchvision=True
    ),
    "MiniCPMOcrForConditionalGeneration": Foreign(needs_torchvision=True),
    "NemotronH_Omni_Reasoning_V3": Foreign(needs_torchvision=True),
    "DeepseekVLForConditionalGeneration": Foreign(image_token=("image_token_id", 100015)),
    "DeepseekVLHybridForConditionalGeneration": Foreign(image_token=("image_token_id", 100015)),
    "Exaone4_5_ForConditionalGeneration": Foreign(image_token=("image_token_id", 67)),
    "Gemma4ForConditionalGeneration": Foreign(image_token=("image_token_id", 258880), changes_logits=True),
    "Glm46VForConditionalGeneration": Foreign(image_token=("image_token_id", 151343), merge=_MERGE),
    "Glm4vForConditionalGeneration": Foreign(image_token=("image_token_id", 151343), merge=_MERGE),
    "Glm4vMoeForConditionalGeneration": Foreign(image_token=("image_token_id", 151363), merge=_MERGE),
    "GlmOcrForConditionalGeneration": Foreign(image_token=("image_token_id", 59280), merge=_MERGE),
    "GotOcr2ForConditionalGeneration": Foreign(image_token=("image_token_index", 151859)),
    "GraniteDoclingForConditionalGeneration": Foreign(
        image_token=("image_token_id", 100337), changes_logits=True, deep="deepstack_visual_indexes"
    ),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Foreign(image_token=("image_token_id", 128060), changes_logits=True),
    "InternVLForConditionalGeneration": Foreign(image_token=("image_token_id", 151667)),
    "JanusForConditionalGeneration": Foreign(image_token=("image_token_id", 100581)),
    "LightOnOcrForConditionalGeneration": Foreign(image_token=("image_token_id", 151655)),
    "LlavaNextForConditionalGeneration": Foreign(image_token=("image_token_index", 32000)),
    "LlavaNextVideoForConditionalGeneration": Foreign(image_token=("image_token_index", 32001)),
    "LlavaOnevisionForConditionalGeneration": Foreign(image_token=("image_token_index", 151646)),
    "MiniCPMV4_6ForConditionalGeneration": Foreign(),
    "Ovis2ForConditionalGeneration": Foreign(
        image_token=("image_token_id", 151665),
        other_tokens=("visual_indicator_token_ids", (151666, 151667, 151668, 151669, 151670)),
        mark="<image>",
    ),
    "PaddleOCRVLForConditionalGeneration": Foreign(image_token=("image_token_id", 100295), merge=_MERGE),
    "QianfanOCRForConditionalGeneration": Foreign(image_token=("image_token_id", 151667), mark="<image>"),
    "Qwen2_5OmniThinkerForConditionalGeneration": Foreign(image_token=("image_token_index", 151655), merge=_MERGE),
    "Qwen3OmniMoeThinkerForConditionalGeneration": Foreign(
        image_token=("image_token_id", 151655), merge=_MERGE, deep="deepstack_visual_indexes"
    ),
    "VideoLlama3ForConditionalGeneration": Foreign(image_token=("image_token_id", 151655)),
    "VideoLlavaForConditionalGeneration": Foreign(image_token=("image_token_index", 32000)),
    "VipLlavaForConditionalGeneration": Foreign(image_token=("image_token_index", 32000)),
}
"""By architecture, what is known of it. One that has a tower of our own is here for the text parts that it lacks."""

TEXT_ONLY: Mapping[str, str] = {
    "Gemma4UnifiedForConditionalGeneration": "transformers' code of it lets images see ahead in other layers when it "
    "generates than when it does not",
    "Granite4VisionForConditionalGeneration": "its decoder gets parts of an image in many layers",
    "Idefics2ForConditionalGeneration": "what its processor writes for an image depends on the text around it",
    "MiniCPMV4_7ForConditionalGeneration": "positions in it follow the canvas on which an image's slices lie",
}
"""Architectures whose text part alone is served, and why."""

NOT_SERVED: Mapping[str, str] = {
    "BlipForConditionalGeneration": _CROSS,
    "ChameleonForConditionalGeneration": _AS_TOKENS,
    "DiffusionGemmaForBlockDiffusion": "it does not continue a text token by token",
    "Emu3ForConditionalGeneration": _AS_TOKENS,
    "EvollaForProteinText2Text": _CROSS,
    "FastVlmForConditionalGeneration": _TIMM,
    "Florence2ForConditionalGeneration": _ENCODER,
    "Gemma3nForConditionalGeneration": _TIMM,
    "IdeficsForVisionText2Text": _CROSS,
    "InstructBlipForConditionalGeneration": _BY_TEXT,
    "InstructBlipVideoForConditionalGeneration": _BY_TEXT,
    "MllamaForConditionalGeneration": _CROSS,
    "PI0ForConditionalGeneration": "it makes movements, not texts",
    "PPFormulaNetForConditionalGeneration": _ENCODER,
    "PaliGemmaForConditionalGeneration": "all positions of its prompt see each other, those of texts, too",
    "PerceptionLMForConditionalGeneration": _TIMM,
    "Pix2StructForConditionalGeneration": _ENCODER,
    "T5Gemma2ForConditionalGeneration": _ENCODER,
    "UdopForConditionalGeneration": _ENCODER,
    "VisionEncoderDecoderModel": _ENCODER,
}
"""Architectures that are not served at all for what they do with images, and why."""

_SCALED_IN_DECODER = ("Granite", "HyperCLOVAX")
"""Beginnings of architectures whose decoder in `transformers` multiplies all embeddings, not only those of tokens."""


def foreign(architecture: str, fields: JsonFields, text: Decoder) -> ForeignVision:
    """Return the tower of an architecture of the table."""
    known = FOREIGN[architecture]
    of_text = fields.object("text_config") or fields
    its = fields.object("vision_config") or JsonFields("config.json: vision_config", {})
    return ForeignVision(
        architecture=architecture,
        image_token=image_token_of(known, fields),
        out_size=text.hidden_size,
        num_deep=len(its.wholes(known.deep)) if known.deep else 0,
        scale=text.embedding_scale if scales_embeddings(text) else 1.0,
        is_whole=of_text.text("use_bidirectional_attention") == "vision",
        is_whole_in_windows=of_text.text("use_bidirectional_attention") == "vision",
        merge=0 if known.merge is None else its.whole(*known.merge),
    )


def scales_embeddings(text: Decoder) -> bool:
    """Return whether the text part multiplies the embeddings of images, too."""
    return text.architecture.startswith(_SCALED_IN_DECODER)


def image_token_of(known: Foreign, fields: JsonFields) -> int:
    """Return the id of a model's image token."""
    name, usual = known.image_token
    other = "image_token_id" if name == "image_token_index" else "image_token_index"
    name = other if fields.raw(name) is None and fields.raw(other) is not None else name
    return fields.whole(name, usual if usual >= 0 else None, least=0)


def other_tokens_of(known: Foreign, fields: JsonFields) -> tuple[int, ...]:
    """Return the ids of a model's further tokens that the tower's outputs replace."""
    name, usual = known.other_tokens
    return tuple(fields.wholes(name)) or usual if name else ()


def why_no_images(architecture: str, *, has_processor: bool) -> str:
    """Return why a model that sees is served as text only; empty if it is not, or if its text part sees nothing.

    `has_processor`: whether the checkpoint has settings of an image processor.
    """
    if architecture in TEXT_ONLY:
        return TEXT_ONLY[architecture]
    if not architecture:
        return ""
    if not has_processor:
        return "the checkpoint has no preprocessor_config.json"
    return "its vision tower is not supported"
