"""Models that also take images or sound: their text part is served, and the weights of other parts are not read."""

from collections.abc import Collection, Mapping
from typing import Any

from penstock.models.parsing.by_transformers import architectures as transformers_architectures
from penstock.models.parsing.by_transformers import seeing_types
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.text_defaults import TEXT_DEFAULTS
from penstock.models.parsing.vision.foreign import FOREIGN, TEXT_ONLY

_TEXT_PARTS: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Idefics3ForConditionalGeneration": {"llama": "LlamaForCausalLM"},
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "LlavaForConditionalGeneration": {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"},
    "LlavaNextForConditionalGeneration": {
        "granite": "GraniteForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    },
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": "Qwen2ForCausalLM", "qwen2_vl": "Qwen2ForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2ForCausalLM", "qwen2_5_vl": "Qwen2ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "Qwen3VLMoeTextModel"},
    "SmolVLMForConditionalGeneration": {"llama": "LlamaForCausalLM"},
}
"""By architecture, and by the model type of its `text_config`: the architecture of the text part.

The first Qwen-VL checkpoints have the text part's fields beside the others, and the whole model's type."""
WHOLE_MODELS = tuple(_TEXT_PARTS)
_TURNING = {
    "Qwen3OmniMoeThinkerForConditionalGeneration": [24, 20, 20],
    "Qwen3_5ForConditionalGeneration": [11, 11, 10],
    "Qwen3_5MoeForConditionalGeneration": [11, 11, 10],
    "Qwen3VLForConditionalGeneration": [24, 20, 20],
    "Qwen3VLMoeForConditionalGeneration": [24, 20, 20],
}
"""Models whose rotary pairs always alternate between time, row and column -> how many pairs each usually has."""
_SAME_TEXTS = {
    "gemma4_unified_text": "Gemma4ForCausalLM",
    "granite4_vision_text": "GraniteForCausalLM",
    "granite_docling_text": "GraniteForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
    "paddleocr_vl_text": "LlamaForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen3_omni_moe_text": "Qwen3VLMoeTextModel",
}
"""Text parts that `transformers` has in no model of their own -> an architecture that computes the same."""
_OTHERWISE: Mapping[str, Mapping[str, Any]] = {
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0},
    "granite_docling_text": {
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "rms_norm_eps": 1e-5,
    },
    "glm4v_text": {"rms_norm_eps": 1e-5},
    "glm4v_moe_text": {"attention_bias": True},
    "glm_ocr_text": {"rms_norm_eps": 1e-5, "attention_bias": False},
}
"""Their usual values of fields, where that architecture has other ones."""
_SECTIONS = {
    "glm4v_text": [8, 12, 12],
    "glm4v_moe_text": [8, 12, 12],
    "glm_ocr_text": [8, 12, 12],
    "paddleocr_vl_text": [16, 24, 24],
    "qwen2_5_omni_text": [16, 24, 24],
}
"""How many rotary pairs of these usually turn with time, row and column, one kind after the other."""
_RENAMED = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.backbone.": "backbone.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
    **{name: name for name in ("model.embed_tokens.", "model.layers.", "model.norm.")},
}
"""Beginnings of the text part's tensor names: before and since transformers 5, and without the rest of the model."""
_INHERITED = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
_OF_THE_WHOLE = ("tie_word_embeddings",)
"""Fields whose value in the whole model takes precedence: the output matrix belongs to the whole model."""


def text_part(architecture: str, fields: JsonFields, own: Collection[str]) -> tuple[str, JsonFields] | None:
    """Return the architecture and configuration of a model's text part; None if unknown.

    `own`: the architectures that a text part may have.
    """
    types = _TEXT_PARTS.get(architecture)
    if types is None and (architecture in FOREIGN or architecture in TEXT_ONLY):
        types = {kind: name for name, kind in transformers_architectures().items() if name in own} | _SAME_TEXTS
    its = None if types is None else fields.object("text_config")
    if types is not None and its is None and fields.text("model_type") in types:
        its = fields
    if types is None or its is None:
        return None
    kind = its.text("model_type") or next(iter(types))
    if kind not in types:
        return None
    inherited = {
        name: fields.raw(name)
        for name in _INHERITED
        if fields.has(name) and (its.raw(name) is None or name in _OF_THE_WHOLE)
    }
    left_out = {} if its is fields else dict(TEXT_DEFAULTS.get(kind, {}))
    if kind in _SAME_TEXTS and kind in _OTHERWISE:
        left_out |= {**_OTHERWISE[kind], "head_dim": its.whole("hidden_size") // its.whole("num_attention_heads")}
    its = its.with_fields({name: size for name, size in left_out.items() if not its.has(name)} | inherited)
    sections = _TURNING.get(architecture)
    if sections is not None:
        its = _turning(its, sections, alternates=True)
    elif kind in _SECTIONS:
        its = _turning(its, _SECTIONS[kind], alternates=False)
    return types[kind], its


def seeing_architecture(config: Mapping[str, Any]) -> str | None:
    """Return the architecture of a model that sees, as `transformers` calls it; None for others, and unknown ones.

    A checkpoint that is older than its support there, and brings code of its own, may have another name for it: then
    its type counts.
    """
    if not isinstance(config.get("vision_config"), dict):
        return None
    known = {*_TEXT_PARTS, *FOREIGN, *TEXT_ONLY}
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    if first in known:
        return str(first)
    by_type = seeing_types().get(str(config.get("model_type"))) if config.get("auto_map") else None
    return by_type if by_type in known else None


def _turning(its: JsonFields, sections: list[int], *, alternates: bool) -> JsonFields:
    """Return rotary settings whose pairs alternate or not, whatever the file says; it may have other sections."""
    name = next((name for name in ("rope_scaling", "rope_parameters") if its.object(name)), "rope_parameters")
    said = its.raw(name) or {}
    return its.with_fields({name: {"mrope_section": sections, **said, "mrope_interleaved": alternates}})


def name_in_text_part(name: str) -> str | None:
    """Return the name that a tensor of the whole model has in the text part; None if it belongs to another part."""
    return next((new + name.removeprefix(old) for old, new in _RENAMED.items() if name.startswith(old)), None)
