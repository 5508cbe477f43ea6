"""A `text_config` has only what differs from its class in transformers; the rest is as that class says."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from penstock.models.description.decoder import Attention, Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.parsing.text_defaults import TEXT_DEFAULTS
from penstock.models.parsing.text_part import _TEXT_PARTS

_WHOLE = {"qwen2_vl", "qwen2_5_vl"}  # types of whole models, which have the text part's fields beside the others
_KINDS = sorted({kind for types in _TEXT_PARTS.values() for kind in types} - _WHOLE)
_GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
    },
}
_LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "model_type": "llava",
    "text_config": {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "vocab_size": 32064},
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "num_attention_heads": 16},
}


def _parsed(config: dict[str, Any]) -> Decoder:
    decoder = parse_model_config(config)
    assert isinstance(decoder, Decoder)
    return decoder


def _by_transformers(kind: str) -> dict[str, Any]:
    config = CONFIG_MAPPING[kind]()
    assert isinstance(config, PretrainedConfig)
    return config.to_dict()


@pytest.mark.parametrize("kind", sorted({*_KINDS, *TEXT_DEFAULTS} - _WHOLE))
def test_sizes_are_those_of_transformers(kind: str) -> None:
    its = _by_transformers(kind)
    assert {name: its[name] for name in TEXT_DEFAULTS[kind]} == TEXT_DEFAULTS[kind]


def _sizes(decoder: Decoder) -> tuple[int, ...]:
    _, attention = next(iter(decoder.attentions))
    assert isinstance(attention, Attention)
    return len(decoder.layers), decoder.hidden_size, decoder.vocab_size, attention.num_heads, attention.head_dim


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [(name, kind) for name, types in _TEXT_PARTS.items() for kind in types if name.startswith("Llava")],
)
def test_nothing_need_be_said(architecture: str, kind: str) -> None:
    its = _by_transformers(kind)
    decoder = _parsed({"architectures": [architecture], "text_config": {"model_type": kind}})
    sizes = its["num_hidden_layers"], its["hidden_size"], its["vocab_size"], its["num_attention_heads"]
    assert _sizes(decoder) == (*sizes, its["hidden_size"] // its["num_attention_heads"])


def test_published_models() -> None:
    assert _sizes(_parsed(_GEMMA_3_4B)) == (34, 2560, 262208, 8, 256)
    assert _sizes(_parsed(_LLAVA)) == (32, 4096, 32064, 32, 128)


def test_the_empty_list_of_llama_4() -> None:
    """Its published files have no layer that rotates, and mean three of four."""
    text: dict[str, Any] = {
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
    }
    said = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text | {"attn_temperature_tuning": 4}}
    meant = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"model_type": "llama4_text"}}
    assert _parsed(said) == _parsed(meant)
    assert [attention.rope is not None for _, attention in _parsed(said).attentions][:4] == [True, True, True, False]
