"""Which tensors a checkpoint of a given architecture has."""

from penstock.core.checkpoint.model_config import ModelConfig

Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that the checkpoint must have, with its shape."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, out_size: int, in_size: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out_size, in_size)
        if bias:
            shapes[f"{name}.bias"] = (out_size,)

    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        linear(f"{layer}.self_attn.q_proj", q_size, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_size, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_size, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, q_size, config.o_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint's tensor is known to carry nothing: a saved rotary buffer, a tied output matrix."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)
