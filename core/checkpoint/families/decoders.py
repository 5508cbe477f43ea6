"""What the families of decoders share: reading the fields that most have, and their registration."""

from collections.abc import Callable, Sequence

from penstock.core.checkpoint.decoder import Activation, Decoder
from penstock.core.checkpoint.families.family import Family
from penstock.core.checkpoint.json_fields import JsonFields
from penstock.core.checkpoint.weights import decoder_tensors
from penstock.core.config.options import ConfigError

MAX_LAYERS = 4096
"""Far more than any real model. What config.json claims costs memory before the first missing weight is noticed."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def decoder_family(
    architectures: Sequence[str], parse: Callable[[str, JsonFields], Decoder], *redundant: str
) -> Family[Decoder]:
    """A family whose weights are where its description says. Tensors with the `redundant` name endings are ignored."""
    endings = (".rotary_emb.inv_freq", *redundant)
    return Family(
        architectures=tuple(architectures),
        parse=parse,
        tensors=decoder_tensors,
        ignores=lambda name, decoder: (
            name.endswith(endings) or (name == f"{decoder.names.head}.weight" and decoder.tied_embeddings)
        ),
        build="penstock.gpu_worker.models.decoder_build:build",
    )


def head_counts(fields: JsonFields, num_kv_heads: int | None = None) -> tuple[int, int]:
    """Query heads and key-value heads; of these there are `num_kv_heads`, or as many, unless config.json says it."""
    num_heads = fields.whole("num_attention_heads")
    num_kv_heads = fields.whole("num_key_value_heads", num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    return num_heads, num_kv_heads


def activation(fields: JsonFields, name: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation of the MLPs."""
    found = fields.text(name) or default
    if found not in _ACTIVATIONS:
        raise ConfigError(f"{name} {found!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[found]


def dtype(fields: JsonFields) -> str:
    """The dtype of the weights, as torch calls it."""
    return (fields.text("dtype") or fields.text("torch_dtype") or "float32").removeprefix("torch.")


def layer_types(fields: JsonFields, num_layers: int, default: Sequence[str]) -> Sequence[str]:
    """Full or sliding attention, for each layer; `default` if config.json does not say it.

    Raises:
        ConfigError: it does not say it for each layer, or it says something else.
    """
    types = fields.texts("layer_types")
    if types is None:
        return default
    if len(types) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in types):
        raise ConfigError(f"config.json: layer_types must name full_attention or sliding_attention {num_layers} times")
    return types
