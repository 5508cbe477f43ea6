"""Vision towers by config.json: what cannot be served is refused in one line, before weights are read."""

from typing import Any

import pytest

from penstock.config.options import ConfigError
from penstock.models.described import own_names_of
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config

_TEXT = {
    "model_type": "qwen3_vl_text",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
_QWEN3 = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": _TEXT,
    "vision_config": {
        "depth": 4,
        "hidden_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0, 2],
    },
}
_LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 190,
    "text_config": {**_TEXT, "model_type": "llama", "rope_scaling": None},
    "vision_config": {
        "model_type": "clip_vision_model",
        "image_size": 28,
        "patch_size": 14,
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 2,
    },
}
_NEXT = {
    **_LLAVA,
    "architectures": ["LlavaNextForConditionalGeneration"],
    "image_grid_pinpoints": [[28, 56], [56, 28]],
}
_PIXTRAL = {
    **_LLAVA,
    "text_config": {**_LLAVA["text_config"], "model_type": "mistral"},
    "vision_config": {"model_type": "pixtral", "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2},
}
_MISTRAL3 = {**_PIXTRAL, "architectures": ["Mistral3ForConditionalGeneration"]}
_IDEFICS3 = {
    **_LLAVA,
    "architectures": ["Idefics3ForConditionalGeneration"],
    "vision_config": {"image_size": 28, "patch_size": 14, "hidden_size": 32, "num_attention_heads": 2},
}
_GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 4,
    "text_config": {**_TEXT, "model_type": "gemma3_text", "rope_scaling": None},
    "vision_config": {**_LLAVA["vision_config"], "model_type": "siglip_vision_model"},
}


def _changed(config: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    return {**config, part: {**config[part], **changes}}


@pytest.mark.parametrize("raw", [_QWEN3, _LLAVA, _NEXT, _PIXTRAL, _MISTRAL3, _IDEFICS3, _GEMMA])
@pytest.mark.parametrize("before", ["", "model."])
def test_the_tower_s_tensors_keep_their_names(raw: dict[str, Any], before: str) -> None:
    """A family puts its own beginning before the text part's names only."""
    config = parse_model_config(raw)
    assert isinstance(config, Decoder)
    assert config.vision is not None
    stored = {name: before + name for name in config.vision.tensors}
    assert own_names_of(stored.values(), config) == stored


def test_embeddings_are_wider_by_those_for_layers() -> None:
    config = parse_model_config(_QWEN3)
    assert isinstance(config, Decoder)
    assert config.vision is not None
    assert (config.vision.out_size, config.vision.width) == (64, 192)


def test_towers_of_another_kind_are_left_and_the_text_part_is_served() -> None:
    for whole, kind in ((_MISTRAL3, "siglip_vision_model"), (_LLAVA, "idefics3_vision")):
        config = parse_model_config(_changed(whole, "vision_config", model_type=kind))
        assert isinstance(config, Decoder)
        assert config.vision is None
    config = parse_model_config(_MISTRAL3)
    assert isinstance(config, Decoder)
    assert config.vision is not None


@pytest.mark.parametrize("said", [None, {"rope_type": "default"}, {"mrope_section": [24, 20, 20], "type": "mrope"}])
def test_rows_and_columns_turn_pairs_by_turns_as_usual(said: dict[str, Any] | None) -> None:
    config = parse_model_config(_changed(_QWEN3, "text_config", rope_scaling=said))
    assert isinstance(config, Decoder)
    ropes = {attention.rope for _, attention in config.attentions}
    assert [rope and rope.section_of_pair for rope in ropes] == [(0, 1, 2, 0, 1, 2, 0, 1)]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (_changed(_QWEN3, "vision_config", hidden_act="tanh"), "hidden_act 'tanh' is not supported"),
        (_changed(_QWEN3, "vision_config", num_heads=3), "32 numbers are not 3 heads of a multiple of 4"),
        (_changed(_QWEN3, "vision_config", out_hidden_size=48), "vectors of 48 numbers, but the text part has 64"),
        (_changed(_QWEN3, "vision_config", num_position_embeddings=24), "24 is not a square"),
        (_changed(_QWEN3, "vision_config", deepstack_visual_indexes=[2, 0]), "must be layers of it, ascending"),
        (_changed(_QWEN3, "vision_config", deepstack_visual_indexes=[4]), "must be layers of it, ascending"),
        (
            _changed(_QWEN3, "vision_config", deepstack_visual_indexes=[0, 1, 2, 3]),
            "more than the text part has layers",
        ),
        (_changed(_QWEN3, "vision_config", depth="many"), "depth"),
        (_changed(_LLAVA, "vision_config", hidden_act="tanh"), "hidden_act 'tanh' is not supported"),
        (_changed(_LLAVA, "vision_config", num_attention_heads=3), "32 numbers are not 3 heads"),
        (_changed(_LLAVA, "vision_config", patch_size=29), "patches of 29 pixels in images of 28"),
        ({**_LLAVA, "vision_feature_layer": -5}, "vision_feature_layer must be of 3 layers"),
        ({**_LLAVA, "vision_feature_layer": "last"}, "vision_feature_layer must be of 3 layers"),
        ({**_LLAVA, "vision_feature_select_strategy": "some"}, "strategy 'some' is not supported"),
        ({**_GEMMA, "mm_tokens_per_image": 3}, "3 does not divide 4 patches evenly"),
        ({**_GEMMA, "mm_tokens_per_image": 16}, "16 does not divide 4 patches evenly"),
        ({**_NEXT, "image_grid_pinpoints": [[28, 57]]}, "sizes of whole tiles of 28 pixels"),
        ({**_NEXT, "image_grid_pinpoints": [28, 56]}, "sizes of whole tiles of 28 pixels"),
        ({**_NEXT, "image_grid_pinpoints": []}, "sizes of whole tiles of 28 pixels"),
        ({**_NEXT, "vision_feature_select_strategy": "full"}, "tiles need all patches"),
        (_changed(_PIXTRAL, "vision_config", num_attention_heads=16), "32 numbers are not 16 heads of a multiple of 4"),
        ({**_MISTRAL3, "vision_feature_layer": [0, 1]}, "must be one layer where neighbours are merged"),
        ({**_IDEFICS3, "scale_factor": 3}, "scale_factor 3 does not divide 4 patches into squares"),
        ({**_LLAVA, "projector_hidden_act": "tanh"}, "projector_hidden_act 'tanh' is not supported"),
    ],
)
def test_what_is_not_served_is_refused(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        parse_model_config(raw)
    assert "\n" not in str(refused.value)


def test_a_model_that_sees_is_known_by_its_type_too() -> None:
    """Checkpoints with code of their own may have a name for their architecture that `transformers` does not know."""
    text = {**_TEXT, "model_type": "qwen2", "rope_scaling": None}
    said = {"model_type": "internvl", "text_config": text, "vision_config": {"hidden_size": 32}}
    named = parse_model_config({"architectures": ["InternVLForConditionalGeneration"], **said})
    own_code = {"architectures": ["InternVLOfOurs"], "auto_map": {"AutoModel": "modeling.Ours"}, **said}
    assert parse_model_config(own_code) == named
    assert named.text_part_of == "InternVLForConditionalGeneration"
    with pytest.raises(ConfigError, match="remote code is never run"):
        parse_model_config({**own_code, "model_type": "internvl_chat"})
