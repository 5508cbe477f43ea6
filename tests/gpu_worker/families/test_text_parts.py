"""The text part of a model that takes images, too: its answers are the whole model's when there are no images."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.config import ConfigError
from penstock.models.description.names import ExpertLayout, Names
from penstock.models.families.registry import parse_model_config
from penstock.models.finding.registry import open_checkpoint
from penstock.models.parsing.text_part import WHOLE_MODELS
from penstock.models.parsing.vision.foreign import TEXT_ONLY
from tests.gpu_worker.families.case import Case, rope
from tests.gpu_worker.families.checkpoints import Reference, config_of, spread
from tests.gpu_worker.families.recurrent import DELTA, SECTIONS
from tests.gpu_worker.families.run import check
from tests.gpu_worker.families.schedules import PAIRWISE
from tests.gpu_worker.families.test_expert_layouts import relaid

_SEEN = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28}
_SEEN_BY_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_SEEN_BY_QWEN2 = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}
_IN_SECTIONS = rope("default", mrope_section=[2, 3, 3])
_SEEN_BY_LLAMA4 = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
_FOUR = {"global_head_dim": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 199}
CASES: dict[str, tuple[str, dict[str, Any], Case]] = {
    "gemma3": ("gemma3", {**_SEEN, "image_size": 16, "patch_size": 1}, Case("gemma3_text", {"num_hidden_layers": 6})),
    "gemma4": ("gemma4", {}, Case("gemma4_text", {**_FOUR, "num_hidden_layers": 6})),
    "gemma4-unified": (
        "gemma4_unified",
        {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 16},
        Case("gemma4_unified_text", {"global_head_dim": 32, "num_hidden_layers": 6}),
    ),
    "granite4-vision": (
        "granite4_vision",
        {**_SEEN, "model_type": "siglip_vision_model", "hidden_size": 64, "patch_size": 14},
        Case("granite4_vision_text", {"embedding_multiplier": 2.0, "logits_scaling": 3.0}),
    ),
    "idefics2": ("idefics2", {**_SEEN, "patch_size": 14}, Case("mistral")),
    "minicpmv4_7": (
        "minicpmv4_7",
        {**_SEEN, "patch_size": 14, "insert_layer_id": 0},
        Case("qwen3_5_text", {**DELTA, **SECTIONS}),
    ),
    "idefics3": ("idefics3", {**_SEEN, "patch_size": 14}, Case("llama")),
    "llama4": ("llama4", {**_SEEN, **_SEEN_BY_LLAMA4}, Case("llama4_text")),
    "llava": ("llava", {**_SEEN, "patch_size": 14}, Case("llama")),
    "llava-next": ("llava_next", {**_SEEN, "patch_size": 14}, Case("llama")),
    "mistral3": ("mistral3", {**_SEEN, "head_dim": 16}, Case("mistral")),
    "mistral3-ministral3": ("mistral3", {**_SEEN, "head_dim": 16}, Case("ministral3")),
    "qwen2-vl": ("qwen2_vl", _SEEN_BY_QWEN2, Case("qwen2_vl_text", _IN_SECTIONS)),
    "qwen2.5-vl": ("qwen2_5_vl", _SEEN_BY_QWEN, Case("qwen2_5_vl_text", _IN_SECTIONS)),
    "qwen3.5": ("qwen3_5", _SEEN_BY_QWEN, Case("qwen3_5_text", {**DELTA, **SECTIONS})),
    "qwen3.5-moe": (
        "qwen3_5_moe",
        _SEEN_BY_QWEN,
        Case("qwen3_5_moe_text", {**DELTA, **SECTIONS, "num_experts": 8}),
    ),
    "qwen3-vl": ("qwen3_vl", {**_SEEN_BY_QWEN, "deepstack_visual_indexes": [0]}, Case("qwen3_vl_text")),
    "qwen3-vl-moe": (
        "qwen3_vl_moe",
        {**_SEEN_BY_QWEN, "deepstack_visual_indexes": [0]},
        Case("qwen3_vl_moe_text", {"num_experts": 8}),
    ),
    "smolvlm": ("smolvlm", {**_SEEN, "patch_size": 14}, Case("llama")),
}
"""The whole model's type, its eyes, and its text part."""
_MORE: dict[str, dict[str, Any]] = {
    "granite4_vision": {"deepstack_layer_map": [[-1, 1]], "downsample_rate": "1/2", "image_grid_pinpoints": [[28, 28]]}
}
"""What else a whole model needs."""


def whole_model(name: str) -> transformers.PreTrainedModel:
    kind, vision, case = CASES[name]
    text = config_of(case)
    parts: dict[str, Any] = {"text_config": text.to_dict(), "vision_config": vision or None}
    parts["tie_word_embeddings"] = getattr(text, "tie_word_embeddings", False)
    config = transformers.CONFIG_MAPPING[kind](**parts, **_MORE.get(kind, {}))
    torch.manual_seed(1)
    made = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model: transformers.PreTrainedModel = made.float().eval()
    spread(model, case.wider)
    return model


@pytest.mark.parametrize("name", CASES)
def test_greedy(tmp_path: Path, name: str) -> None:
    reference = Reference(tmp_path, CASES[name][2], whole_model(name))
    for run, kernels in zip(PAIRWISE[:2], ("native", "torch"), strict=True):
        check(reference, run, model_impl="own", cpu_kernels=kernels)


@pytest.mark.parametrize(("name", "layout"), [("qwen3.5-moe", "joined"), ("qwen3-vl-moe", "turned")])
def test_experts_as_published(tmp_path: Path, name: str, layout: ExpertLayout) -> None:
    """And read by transformers, which writes them otherwise."""
    model = whole_model(name)
    reference = Reference(tmp_path, CASES[name][2], model)
    model.save_pretrained(tmp_path, save_original_format=False)
    path = tmp_path / "model.safetensors"
    save_file(relaid(load_file(path), Names(experts="joined"), layout), path)
    check(reference, PAIRWISE[0], model_impl="own")


def test_all_are_tried() -> None:
    made = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    assert {made[kind] for kind, _, _ in CASES.values()} == {*WHOLE_MODELS, *TEXT_ONLY}


def test_transformers_code_does_not_compute_parts(tmp_path: Path) -> None:
    whole_model("llava").save_pretrained(tmp_path)
    config = open_checkpoint(tmp_path).config
    assert parse_model_config(config).text_part_of == "LlavaForConditionalGeneration"
    with pytest.raises(ConfigError, match="text part of LlavaForConditionalGeneration"):
        parse_model_config(config, "transformers")
