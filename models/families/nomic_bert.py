"""NomicBERT (Nussbaum et al., 2024): BERT with rotated positions, gated MLPs and no biases."""

from penstock.config.options import ConfigError
from penstock.models.description.decoder import DenseMLP, Norm
from penstock.models.description.encoder import Encoder, EncoderAttention, EncoderLayer, EncoderNames
from penstock.models.parsing import decoders
from penstock.models.parsing.encoders import encoder_family, refuse
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = EncoderNames(
    base="",
    embedding_norm="emb_ln",
    layer="encoder.layers.{}.",
    attention_norm="norm1",
    mlp_norm="norm2",
    qkv=("attn.Wqkv",),
    o="attn.out_proj",
    gate_up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
)
_AS_IN_TRANSFORMERS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
_GATED = {"swiglu": "silu", "geglu": "gelu"}


def parse(architecture: str, fields: JsonFields) -> Encoder:
    """Like `Family.parse`."""
    if fields.has("n_embd"):  # as published, with GPT-2's names
        fields = _renamed(fields)
    hidden_size, num_heads = fields.whole("hidden_size", 768), fields.whole("num_attention_heads", 12)
    head_dim = fields.whole("head_dim", decoders.usual_head_dim(hidden_size, num_heads))
    trained = fields.whole("max_position_embeddings", 2048)
    rope, max_len = parse_rope(fields, trained, head_dim, theta=1000.0)
    if rope.kind != "default":
        raise ConfigError(f"config.json: rope type {rope.kind!r} is not supported in encoders; supported: default")
    attention = EncoderAttention(
        num_heads=num_heads, head_dim=head_dim, scale=head_dim**-0.5, has_bias=False, rope=rope
    )
    size = fields.whole("intermediate_size", 4 * hidden_size)
    mlp = DenseMLP(size=size, activation=decoders.activation(fields))
    return Encoder(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        layers=(EncoderLayer(attention=attention, mlp=mlp),) * decoders.num_layers(fields),
        norm=Norm(kind="layer", eps=fields.number("layer_norm_eps", 1e-12), has_bias=True),
        num_types=fields.whole("type_vocab_size", 2, least=0),
        max_model_len=max_len,
        checkpoint_dtype=decoders.dtype(fields),
        names=_NAMES,
    )


def _renamed(fields: JsonFields) -> JsonFields:
    """The fields under transformers' names."""
    refuse(
        fields, qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, prenorm=False, parallel_block=False,
        rotary_emb_fraction=1.0, rotary_emb_interleaved=False, rotary_emb_scale_base=None, use_rms_norm=False,
        causal=False, moe_every_n_layers=0,
    )  # fmt: skip
    activation = fields.text("activation_function", "swiglu")
    if activation not in _GATED:
        raise ConfigError(
            f"config.json: activation_function {activation[:64]!r} is not supported; supported: {', '.join(_GATED)}"
        )
    found = {new: fields.raw(old) for old, new in _AS_IN_TRANSFORMERS.items() if fields.raw(old) is not None}
    trained = fields.raw("max_trained_positions") or fields.raw("n_positions")
    return fields.with_fields({**found, "hidden_act": _GATED[activation], "max_position_embeddings": trained})


NOMIC_BERT = encoder_family(("NomicBertModel", "NomicBertForMaskedLM"), parse, base="")
