"""Described decoders on the native CPU kernels: like torch's kernels, and the same bits in any batch."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from penstock.gpu_worker.models.decoder import DecoderModel
from penstock.gpu_worker.models.native_decoder import NativeDecoderModel
from penstock.gpu_worker.models.native_program import lacking
from penstock.kernels.native.library import Library
from penstock.models.description.decoder import (
    Activation,
    Attention,
    Decoder,
    DenseMLP,
    Experts,
    LatentAttention,
    Layer,
    LearnedPositions,
    Norm,
    QueryGrowth,
    Router,
)
from penstock.models.description.names import Names
from penstock.models.parsing.rope import RopeConfig
from tests.kernels.native.native_library import load_library
from tests.kernels.native.test_native import World, alone, by_token, in_chunks, weights, whole

_ROPE = RopeConfig(kind="default", theta=1e4, original_max_len=512, dim=24)
_RMS, _OFFSET = Norm(), Norm(eps=1e-5, offset=1.0)
_LAYER_NORM = Norm(kind="layer", has_bias=True)
_ATTENTION = Attention(num_heads=6, num_kv_heads=2, head_dim=24, scale=0.2, rope=_ROPE)
_LAYER = Layer(mixer=_ATTENTION, mlp=DenseMLP(size=100), mixer_norm=_RMS, mlp_norm=_RMS)
_NAMES = Names(
    positions="positions_embed",
    post_mixer_norm="post_mixer_norm",
    post_mlp_norm="post_mlp_norm",
    shared_gate="mlp.shared_gate",
)


def attention(**changes: Any) -> Layer:
    return replace(_LAYER, mixer=replace(_ATTENTION, **changes))


def mlp(activation: Activation, **changes: Any) -> Layer:
    return replace(_LAYER, mlp=DenseMLP(size=75, activation=activation, **changes))


def experts(router: Router, **changes: Any) -> Layer:
    return replace(_LAYER, mlp=Experts(count=8, size=40, router=router, **changes))


_SANDWICH = replace(
    attention(softcap=2.0, window=21, q_norm=_OFFSET, k_norm=_OFFSET),
    **{f"{name}_norm": _OFFSET for name in ("mixer", "post_mixer", "mlp", "post_mlp")},
    mlp=DenseMLP(size=33, activation="gelu_tanh"),
)
_LAYERS: dict[str, tuple[Layer, ...]] = {
    "sandwich, two thetas, a window": (_SANDWICH, attention(rope=replace(_ROPE, theta=1e6)), _SANDWICH),
    "norms after each part only": (
        replace(_LAYER, mixer_norm=None, mlp_norm=None, post_mixer_norm=_RMS, post_mlp_norm=_RMS),
        replace(attention(norms_span="all", q_norm=_RMS, k_norm=_RMS), mixer_norm=None, residual_scale=0.3),
    ),
    "parallel": (replace(_LAYER, mixer_norm=_LAYER_NORM, mlp_norm=None, is_parallel=True, residual_scale=0.5),),
    "parallel with two norms": (replace(_LAYER, mlp_norm=_LAYER_NORM, is_parallel=True),),
    "weightless layer norm, part of heads rotates": (
        replace(attention(rope=replace(_ROPE, dim=10)), mixer_norm=Norm(kind="layer", has_weight=False)),
    ),
    "no rotation, growing queries, norms after rope": (
        attention(rope=None, query_growth=QueryGrowth(beta=0.2, length=8.0, shift=1)),
        attention(norms_follow_rope=True, q_norm=Norm(has_weight=False), k_norm=Norm(has_weight=False)),
    ),
    "sinks, biases": (attention(has_sinks=True, window=17, qkv_bias=True, o_bias=True), attention(has_sinks=True)),
    "heads of several sizes": (attention(num_heads=4, num_kv_heads=1, head_dim=48, window=40), attention()),
    "squares, biases": (mlp("relu2", is_gated=False, has_bias=True), mlp("gelu", is_gated=False)),
    "experts": (experts(Router(top_k=2)), _LAYER, experts(Router(top_k=2, renormalize=True))),
    "clamped experts": (
        experts(Router(kind="top_softmax", top_k=3, has_bias=True), activation="clamped_swiglu", has_bias=True),
    ),
    "experts in groups, shared": (
        replace(
            experts(
                Router(kind="sigmoid", top_k=2, has_correction=True, num_groups=4, top_groups=2, scale=2.5),
                shared=DenseMLP(size=80),
            ),
            residual_scale=0.7,
        ),
    ),
    "experts with a gated shared one, a norm after them": (
        replace(
            experts(Router(top_k=4), shared=DenseMLP(size=50), shared_is_gated=True),
            post_mlp_norm=_RMS,
            residual_scale=0.7,
        ),
    ),
    "experts of scaled inputs": (experts(Router(kind="sigmoid", top_k=1, multiplies_input=True)),),
}
_LATENT = LatentAttention(
    num_heads=5,
    q_rank=31,
    kv_rank=26,
    nope_dim=12,
    rope_dim=10,
    v_dim=14,
    scale=0.3,
    rope=replace(_ROPE, dim=10),
    norm=_RMS,
)
_LAYERS |= {
    "latents": (replace(_LAYER, mixer=_LATENT), replace(_LAYER, mixer=_LATENT)),
    "latents, queries projected directly, experts": (
        replace(experts(Router(top_k=2)), mixer=replace(_LATENT, q_rank=None, nope_dim=7, v_dim=33)),
        replace(_LAYER, mixer=replace(_LATENT, v_dim=9), mlp_norm=None, post_mixer_norm=_RMS),
    ),
}
_MODELS: dict[str, dict[str, Any]] = {
    "scales": {"embedding_scale": 6.0, "logit_scale": 0.25, "logit_softcap": 3.0},
    "learned positions": {"positions": LearnedPositions(count=512, offset=2), "final_norm": _LAYER_NORM},
    "a biased head, no final norm": {"head_bias": True, "final_norm": None},
    "tied, odd sizes": {"tied_embeddings": True, "hidden_size": 47},
}
_CASES = [*_LAYERS, *_MODELS]


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(request.param)


def decoder(name: str) -> Decoder:
    layers = _LAYERS.get(name, (_LAYER, _LAYER))
    plain = Decoder(
        architecture="Tiny",
        vocab_size=131,
        max_model_len=512,
        checkpoint_dtype="float32",
        names=replace(_NAMES, gate_up=("mlp.up_proj",)) if name == "squares, biases" else _NAMES,
        hidden_size=48,
        layers=layers,
        final_norm=_RMS,
    )
    return replace(plain, **_MODELS.get(name, {}))


@pytest.mark.parametrize("name", _CASES)
@torch.inference_mode()
def test_like_torch(library: Library, name: str) -> None:
    config = decoder(name)
    assert lacking(config) is None
    stored = weights(config, torch.float32)
    world = World(config, 16)
    expected = world.run(DecoderModel(config, stored), whole(world))
    kv = world.kv.blocks.clone()
    found = world.run(NativeDecoderModel(config, stored, library), whole(world))
    torch.testing.assert_close(world.kv.blocks, kv, rtol=1e-4, atol=1e-4)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_same_bits_in_any_batch(library: Library, name: str, dtype: torch.dtype) -> None:
    config = decoder(name)
    model = NativeDecoderModel(config, weights(config, dtype), library, rounds_inputs=dtype == torch.bfloat16)
    world = World(config, 16, dtype)
    expected = world.run(model, alone(world))
    for batches in (whole, by_token, in_chunks):
        for one, other in zip(world.run(model, batches(world)), expected, strict=True):
            assert torch.equal(one, other), batches.__name__
