"""Decoders with latent attention: DeepSeek V2 to V3.2 (and R1, Kimi-K2, Moonlight), GLM-4.7-Flash, GLM-5, Youtu."""

import math
from typing import NamedTuple

from msgspec.structs import replace

from penstock.models.description.decoder import (
    Activation,
    Decoder,
    DenseMLP,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    Norm,
    Router,
)
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.family import NotDescribed
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope, rope_settings


class _Variant(NamedTuple):
    """An architecture's special features, and the defaults of transformers for fields missing in config.json."""

    q_rank: int = 1536
    nope_dim: int = 128
    v_dim: int = 128
    max_len: int = 4096
    eps: float = 1e-6
    num_dense: int | None = 3  # dense layers at the beginning; None: all
    num_experts: int = 256
    top_k: int | None = 8  # None: config.json must say it
    expert_size: int = 2048
    num_shared: int = 1
    groups: tuple[int, int] = (8, 4)  # number of groups, and of those from which experts are chosen
    scale: float = 2.5
    is_tied: bool = False
    is_softmax: bool = False  # the router of V2
    index_heads: int = 0  # of an indexer; 0: there is none
    index_is_interleaved: bool = False


_VARIANTS = {
    "DeepseekV2ForCausalLM": _Variant(
        max_len=2048, num_dense=0, num_experts=64, top_k=None, expert_size=1407, num_shared=2, groups=(1, 1), scale=1.0,
        is_softmax=True,
    ),
    "DeepseekV3ForCausalLM": _Variant(),
    "DeepseekV32ForCausalLM": _Variant(max_len=163840, index_heads=64),
    "GlmMoeDsaForCausalLM": _Variant(
        q_rank=2048, nope_dim=192, v_dim=256, max_len=202752, eps=1e-5, groups=(1, 1), index_heads=32,
        index_is_interleaved=True,
    ),
    "Glm4MoeLiteForCausalLM": _Variant(
        q_rank=768, nope_dim=192, v_dim=256, max_len=202752, eps=1e-5, num_dense=1, num_experts=64, top_k=4,
        expert_size=1536, groups=(1, 1), scale=1.8,
    ),
    "YoutuForCausalLM": _Variant(max_len=131072, num_dense=None, is_tied=True),
}  # fmt: skip


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    variant, num_layers = _VARIANTS[architecture], decoders.num_layers(fields)
    rope_dim = fields.whole("qk_rope_head_dim", 64)
    trained_len = fields.whole("max_position_embeddings", variant.max_len)
    is_interleaved = variant.is_softmax or fields.flag("rope_interleave", True)
    rope, max_model_len = parse_rope(fields, trained_len, rope_dim, is_interleaved=is_interleaved)
    if rope.dim != rope_dim:
        raise NotDescribed("config.json: partial_rotary_factor is not supported for latent attention")
    nope_dim = fields.whole("qk_nope_head_dim", variant.nope_dim)
    has_q_latent = not fields.has("q_lora_rank") or fields.raw("q_lora_rank") is not None
    mixer = LatentAttention(
        num_heads=fields.whole("num_attention_heads"),
        q_rank=fields.whole("q_lora_rank", variant.q_rank) if has_q_latent else None,
        kv_rank=fields.whole("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=fields.whole("v_head_dim", variant.v_dim),
        scale=(nope_dim + rope_dim) ** -0.5 * _mscale(fields, rope.factor) ** 2,
        rope=rope,
        norm=Norm(eps=1e-6),
        has_bias=fields.flag("attention_bias"),
    )
    mixers = [replace(mixer, indexer=its) for its in _indexers(fields, variant, num_layers, mixer)]
    norm = Norm(eps=fields.number("rms_norm_eps", variant.eps))
    act = decoders.activation(fields)
    has_bias = variant.is_softmax and fields.flag("mlp_bias")
    dense = DenseMLP(size=fields.whole("intermediate_size"), activation=act, has_bias=has_bias)
    is_dense = _dense_layers(fields, variant, num_layers)
    experts = dense if all(is_dense) else _experts(fields, variant, act, has_bias)
    layers = [
        Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=dense if its else experts)
        for mixer, its in zip(mixers, is_dense, strict=True)
    ]
    names = Names(unused_layers=fields.whole("num_nextn_predict_layers", 1, least=0, most=decoders.MAX_LAYERS))
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, names, is_tied=variant.is_tied)


def _indexers(
    fields: JsonFields, variant: _Variant, num_layers: int, mixer: LatentAttention
) -> list[Indexer] | list[None]:
    """The indexer of each layer."""
    if not variant.index_heads:
        return [None] * num_layers
    if mixer.q_rank is None:
        raise NotDescribed("config.json: an indexer needs queries with a latent, so q_lora_rank must not be null")
    its = Indexer(
        num_heads=fields.whole("index_n_heads", variant.index_heads),
        head_dim=fields.whole("index_head_dim", 128, least=mixer.rope_dim),
        top_k=fields.whole("index_topk", 2048),
        norm=Norm(kind="layer", eps=1e-6, has_bias=True),
        is_interleaved=variant.index_is_interleaved,
    )
    return [replace(its, is_shared=is_shared) for is_shared in _shared_choices(fields, num_layers)]


def _shared_choices(fields: JsonFields, num_layers: int) -> list[bool]:
    """Whether each layer uses the choice of one before it ("IndexCache", arXiv 2603.12201, 2026)."""
    pattern = fields.text("index_topk_pattern") if isinstance(fields.raw("index_topk_pattern"), str) else None
    kinds = fields.texts("indexer_types") or fields.texts("index_topk_pattern") if pattern is None else list(pattern)
    if kinds is None:
        every = max(1, fields.whole("index_topk_freq", 1, least=0))
        offset = fields.whole("index_skip_topk_offset", 2, least=0)
        return [max(0, layer - offset + 1) % every != 0 for layer in range(num_layers)]
    names = {"F": "full", "S": "shared"}
    kinds = [names.get(kind, kind) for kind in kinds]
    if len(kinds) != num_layers or not {*kinds} <= {"full", "shared"} or kinds[0] != "full":
        raise NotDescribed(
            f"config.json: indexer_types must say full or shared for each of {num_layers} layers, and begin with full"
        )
    return [kind == "shared" for kind in kinds]


def _mscale(fields: JsonFields, factor: float) -> float:
    """YaRN's factor for queries and keys, beside cosines and sines; it also applies to the parts that do not rotate."""
    weight = rope_settings(fields).number("mscale_all_dim", 0.0)
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _dense_layers(fields: JsonFields, variant: _Variant, num_layers: int) -> list[bool]:
    """Whether each layer has a dense MLP."""
    if variant.num_dense is None:
        return [True] * num_layers
    if (types := fields.texts("mlp_layer_types")) is not None:
        if len(types) != num_layers or not {*types} <= {"dense", "sparse"}:
            raise NotDescribed(f"config.json: mlp_layer_types must name dense or sparse {num_layers} times")
        return [kind == "dense" for kind in types]
    if fields.whole("moe_layer_freq", 1) != 1:
        raise NotDescribed("config.json: moe_layer_freq is only supported if it is 1")
    first = fields.whole("first_k_dense_replace", variant.num_dense, least=0)
    return [i < first for i in range(num_layers)]


def _experts(fields: JsonFields, variant: _Variant, act: Activation, has_bias: bool) -> Experts:
    kind, method = ("softmax", "greedy") if variant.is_softmax else ("sigmoid", "noaux_tc")
    method = fields.text("topk_method") or method
    if fields.text("scoring_func", kind) != kind or (method == "noaux_tc") == variant.is_softmax:
        raise NotDescribed(f"config.json: scoring_func or topk_method is not that of {kind} routing")
    if variant.is_softmax and fields.flag("norm_topk_prob"):
        raise NotDescribed("config.json: norm_topk_prob is not supported with softmax routing")
    has_groups = method != "greedy"
    router = Router(
        kind="softmax" if variant.is_softmax else "sigmoid",
        top_k=fields.whole("num_experts_per_tok", variant.top_k),
        renormalize=not variant.is_softmax and fields.flag("norm_topk_prob", True),
        renormalize_eps=1e-20,
        has_correction=not variant.is_softmax,
        num_groups=fields.whole("n_group", variant.groups[0]) if has_groups else 1,
        top_groups=fields.whole("topk_group", variant.groups[1]) if has_groups else 1,
        group_judge="max" if variant.is_softmax else "top2",
        scale=fields.number("routed_scaling_factor", variant.scale),
    )
    size = fields.whole("moe_intermediate_size", variant.expert_size)
    num_shared = fields.whole("n_shared_experts", variant.num_shared)
    shared = DenseMLP(size=size * num_shared, activation=act, has_bias=has_bias)
    count = fields.whole("n_routed_experts", variant.num_experts)
    return Experts(count=count, size=size, router=router, activation=act, shared=shared)


DEEPSEEK = decoders.decoder_family(tuple(_VARIANTS), parse)
