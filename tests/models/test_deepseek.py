"""Configurations with latent attention: what they are parsed to, and what is refused."""

import math
from typing import Any

import pytest

from penstock.config import ConfigError
from penstock.models.description.decoder import Decoder, Experts, LatentAttention
from penstock.models.families.registry import is_ignored, parse_model_config
from penstock.models.shards.stages import most_stages
from penstock.models.weights.decoder import LatentSources, decoder_sources

_FIELDS = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 99,
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2,
}  # fmt: skip


def parse(architecture: str = "DeepseekV3ForCausalLM", **changes: Any) -> Decoder:
    config = parse_model_config({"architectures": [architecture], **_FIELDS, **changes}, "own")
    assert isinstance(config, Decoder)
    return config


def mixer(decoder: Decoder) -> LatentAttention:
    its = decoder.layers[0].mixer
    assert isinstance(its, LatentAttention)
    return its


def sources_of(decoder: Decoder) -> LatentSources:
    sources = decoder_sources(decoder).layers[0].mixer
    assert isinstance(sources, LatentSources)
    return sources


def test_positions_keep_a_latent_and_a_key() -> None:
    assert [shape.key_dim + shape.value_dim for shape in parse().kv] == [36, 36, 36]


def test_yarn_scales_scores_too() -> None:
    """By the square of what would multiply both queries and keys."""
    plain = mixer(parse())
    assert plain.scale == 20**-0.5
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}
    assert mixer(parse(rope_scaling=yarn)).scale == plain.scale
    scaled = mixer(parse(rope_scaling={**yarn, "mscale_all_dim": 1.0}))
    assert math.isclose(scaled.scale, plain.scale * (0.1 * math.log(40) + 1) ** 2)
    assert scaled.rope is not None
    assert scaled.rope.attention_factor == 1.0


def test_rows_of_neighbours_that_rotate_are_put_apart() -> None:
    """In the last numbers of each head of the queries, and of the key beside the latent."""
    sources = sources_of(parse())
    assert sources.q.weight.order == (*range(16), 16, 18, 17, 19, *range(20, 36), 36, 38, 37, 39)
    assert sources.kv_a.weight.order == (*range(32), 32, 34, 33, 35)
    halves = sources_of(parse(rope_interleave=False))
    assert halves.q.weight.order is None


def test_layers_that_predict_more_tokens_are_ignored() -> None:
    assert is_ignored("model.layers.3.eh_proj.weight", parse(num_nextn_predict_layers=1))
    assert not is_ignored("model.layers.4.eh_proj.weight", parse(num_nextn_predict_layers=1))
    assert not is_ignored("model.layers.3.eh_proj.weight", parse(num_nextn_predict_layers=0))


def test_which_layers_are_mixtures() -> None:
    def mixtures(decoder: Decoder) -> list[bool]:
        return [isinstance(layer.mlp, Experts) for layer in decoder.layers]

    assert mixtures(parse()) == [False, True, True]
    assert mixtures(parse(first_k_dense_replace=9)) == [False] * 3
    types = ["sparse", "dense", "sparse"]
    assert mixtures(parse("Glm4MoeLiteForCausalLM", mlp_layer_types=types)) == [True, False, True]
    assert mixtures(parse("YoutuForCausalLM")) == [False] * 3


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func or topk_method"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "scoring_func or topk_method"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("DeepseekV2ForCausalLM", {"num_experts_per_tok": None}, "num_experts_per_tok must be"),
        ("DeepseekV3ForCausalLM", {"n_group": 3}, r"of 3 groups \(8 experts\)"),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}},
         "partial_rotary_factor"),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 5}, "must be an even number"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must name"),
    ],
)  # fmt: skip
def test_what_is_refused(architecture: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(architecture, **changes)


_GLM_5 = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 4, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    ("fields", "shared"),
    [
        ({}, [False, False, False]),
        ({"indexer_types": ["full", "shared", "full"]}, [False, True, False]),
        ({"index_topk_pattern": "FSS"}, [False, True, True]),
        ({"index_topk_freq": 2}, [False, False, True]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [False, True, False]),
    ],
)
def test_layers_that_share_a_choice(fields: dict[str, Any], shared: list[bool]) -> None:
    """They have no weights of an indexer, but keep as many numbers as the others, because a page needs that."""
    decoder = parse("GlmMoeDsaForCausalLM", **{**_GLM_5, **fields})
    mixers = [layer.mixer for layer in decoder.layers if isinstance(layer.mixer, LatentAttention)]
    assert [its.indexer is not None and its.indexer.is_shared for its in mixers] == shared
    sources = [its.mixer for its in decoder_sources(decoder).layers if isinstance(its.mixer, LatentSources)]
    assert [its.indexer is None for its in sources] == shared
    assert {shape.key_dim for shape in decoder.kv} == {32 + 4 + 16}
    assert most_stages(decoder) == shared.count(False)


def test_index_queries_rotate_as_they_are_stored() -> None:
    interleaved = sources_of(parse("GlmMoeDsaForCausalLM", **_GLM_5)).indexer
    halves = sources_of(parse("DeepseekV32ForCausalLM", **_GLM_5)).indexer
    assert interleaved is not None
    assert halves is not None
    assert interleaved.k.weight.order == (0, 2, 1, 3, *range(4, 16))
    assert halves.k.weight.order is None


@pytest.mark.parametrize(
    "fields",
    [
        {"indexer_types": ["shared", "full", "full"]},
        {"indexer_types": ["full", "full"]},
        {"index_topk_pattern": "FXF"},
        {"q_lora_rank": None},
        {"index_head_dim": 2},
    ],
)
def test_indexers_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse("GlmMoeDsaForCausalLM", **{**_GLM_5, **fields})
