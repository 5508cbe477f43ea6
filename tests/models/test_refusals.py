"""What is said of architectures that are not supported: each word must be true of what it is said of."""

import re
from typing import Any

import pytest

from penstock.config.options import ConfigError
from penstock.models.families.registry import parse_model_config

_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
_SPARSE = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "kv_lora_rank": 32, "q_lora_rank": 32}


def refused(architecture: str, **fields: Any) -> str:
    with pytest.raises(ConfigError) as refusal:
        parse_model_config({"architectures": [architecture], **fields})
    return str(refusal.value)


def nearest_of(message: str) -> str:
    found = re.search(r"the nearest that is: (\w+)", message)
    return "" if found is None else found[1]


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("DeepseekV4ForCausalLM", _SPARSE | {"layer_types": ["compressed_sparse_attention"] * 2}),
        ("DeepseekV4ForCausalLM", {"layer_types": ["compressed_sparse_attention"] * 2}),
        ("HYV4ForCausalLM", _SPARSE | {"layer_types": ["indexed_attention"] * 2}),
        ("NoSuchSparseForCausalLM", _SPARSE),
        ("BloomForCausalLM", {}),
        ("Lama5ForCausalLM", {"num_loops": 3}),
        ("NoSuchForCausalLM", {"layer_types": ["linear_attention", "full_attention"]}),
        ("NoSuchForCausalLM", {"layer_types": ["scan", "full_attention"]}),
    ],
)
def test_the_nearest_architecture_is_served_itself(architecture: str, fields: dict[str, Any]) -> None:
    message = refused(architecture, **_TEXT, **fields)
    assert architecture in message
    near = nearest_of(message)
    if near:
        assert near != architecture
        assert not near.endswith("TextModel"), "no file names that"
        parse_model_config({"architectures": [near], **_TEXT, **fields})
    assert bool(near) == ("layer_types" not in fields), "what overlooks the kinds of layers is not near"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vision_config": {"depth": 1}}, "(it takes images in a way that is not supported)"),
        ({"image_token_id": 7}, "(it takes images in a way that is not supported)"),
        ({"audio_config": {"depth": 1}}, "(it takes sound in a way that is not supported)"),
        (
            {"audio_config": {"depth": 1}, "vision_config": {"depth": 1}},
            "(it takes images and sound in a way that is not supported)",
        ),
    ],
)
def test_a_model_of_other_senses_is_told_which(fields: dict[str, Any], says: str) -> None:
    """Models that take images are served, but not all of them."""
    message = refused("NoSuchForConditionalGeneration", text_config=_TEXT, **fields)
    assert message == f"architecture NoSuchForConditionalGeneration is not supported {says}"


@pytest.mark.parametrize(
    "architecture",
    ["AriaForConditionalGeneration", "Gemma3nForConditionalGeneration", "MolmoForConditionalGeneration"],
)
def test_a_model_with_its_text_in_a_part_is_named(architecture: str) -> None:
    message = refused(architecture, text_config=_TEXT, vision_config={"depth": 1})
    assert message.startswith(f"architecture {architecture} is not supported")
    assert "num_hidden_layers" not in message


def test_a_field_that_is_missing_is_still_named() -> None:
    fields = {name: value for name, value in _TEXT.items() if name != "num_hidden_layers"}
    assert "num_hidden_layers must be a positive integer" in refused("BitNetForCausalLM", **fields)
