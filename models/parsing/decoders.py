"""Shared by the families of decoders: reading common fields, and registration."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Activation, Attention, Decoder, Experts, Layer, Norm, Router
from penstock.models.description.names import Names
from penstock.models.parsing.family import Family
from penstock.models.parsing.json_fields import JsonFields, shown
from penstock.models.weights.decoder import CLASSES, decoder_matrices, decoder_tensors

MAX_LAYERS = 4096
"""Far more than any real model has. Each claimed layer costs memory before the first missing weight is noticed."""
_MAX_WIDTH = 1 << 22
_MAX_EXPERTS = 4096
_USUAL = Names()
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

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def decoder_family(
    architectures: Sequence[str],
    parse: Callable[[str, JsonFields], Decoder],
    *redundant: str,
    base: str = "",
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Family[Decoder]:
    """Return a family whose weights are where its description says.

    Args:
        architectures: their names in config.json.
        parse: as `Family.parse`.
        redundant: endings of the names of ignored tensors.
        base: the beginning of all names but the head's; checkpoints of the model without a head lack it.
        renamed: parts of names that transformers may write -> those in published checkpoints.
    """
    endings = (".rotary_emb.inv_freq", *redundant)

    def known_as(name: str) -> str:
        for new, published in renamed.items():
            name = name.replace(new, published)
        return name if name.startswith((base, "lm_head.", CLASSES)) else base + name

    def ignores(name: str, decoder: Decoder) -> bool:
        names, first = decoder.names, len(decoder.layers)
        unused = tuple(names.layer.format(first + i) for i in range(names.unused_layers))
        is_double = decoder.tied_embeddings and name == f"{names.head}.weight"
        return is_double or name.endswith(endings) or name.startswith((*unused, *names.unused))

    return Family(
        architectures=tuple(architectures),
        parse=lambda architecture, fields: _checked(_as_stored(parse(architecture, fields), fields)),
        tensors=decoder_tensors,
        matrices=decoder_matrices,
        ignores=ignores,
        known_as=known_as,
        build="penstock.gpu_worker.models.loading.decoder_build:build",
    )


def _as_stored(decoder: Decoder, fields: JsonFields) -> Decoder:
    """Return the decoder with the names of weights in a checkpoint of another form, if these fields say so."""
    if not fields.flag("has_plain_matrices"):
        return decoder
    return replace(decoder, names=decoder.names.plain(splits_kv_b=fields.flag("has_split_kv_b")))


def _checked(decoder: Decoder) -> Decoder:
    """Refuse values that no family intends: they would fail later, or cost too much before that."""
    for layer in dict.fromkeys(decoder.layers):
        mixer = layer.mixer
        mlp = layer.mlp if layer.beside_mlp is None else layer.beside_mlp.experts
        if mixer is not None and mixer.width > _MAX_WIDTH:
            what = (
                f"{layer.attention.num_heads} attention heads" if layer.attention else "the heads of a recurrent mixer"
            )
            raise ConfigError(f"config.json: {what} of this size are too many")
        if isinstance(mlp, Experts):
            count, router = mlp.count, mlp.router
            if not router.top_k <= count <= _MAX_EXPERTS:
                raise ConfigError(
                    f"config.json: {router.top_k} of {count} experts cannot be chosen; at most {_MAX_EXPERTS} may be"
                )
            if count % router.num_groups or router.top_groups > router.num_groups:
                raise ConfigError(
                    f"config.json: {router.top_groups} of {router.num_groups} groups ({count} experts) cannot be chosen"
                )
            of_group = count // router.num_groups
            judged = 2 if router.num_groups > 1 and router.group_judge == "top2" else 1
            if router.top_k > router.top_groups * of_group or judged > of_group:
                raise ConfigError(
                    f"config.json: {router.top_k} experts cannot come from {router.top_groups} groups of {of_group}"
                )
    return decoder


def head_counts(fields: JsonFields, num_kv_heads: int | None = None) -> tuple[int, int]:
    """Return the numbers of query heads and of key-value heads (`num_kv_heads` unless config.json has it)."""
    num_heads = fields.whole("num_attention_heads")
    is_null = fields.has("num_key_value_heads")
    num_kv_heads = fields.whole("num_key_value_heads", num_heads if is_null else num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads, {num_heads}, is no multiple of num_key_value_heads, {num_kv_heads}"
        )
    return num_heads, num_kv_heads


def attention(
    fields: JsonFields,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    has_bias: bool = False,
    *,
    has_groups: bool = True,
) -> Attention:
    """Return plain attention, without positions.

    Args:
        fields: config.json.
        num_kv_heads: as in `head_counts`.
        head_dim: unless config.json has another; None, or null there: the hidden size divided by the query heads.
        has_bias: of all projections.
        has_groups: whether config.json may have fewer key-value heads, and another head size.
    """
    num_heads, num_kv_heads = (
        head_counts(fields, num_kv_heads) if has_groups else (fields.whole("num_attention_heads"),) * 2
    )
    if head_dim is None or fields.has("head_dim"):
        head_dim = usual_head_dim(fields.whole("hidden_size"), num_heads)
    head_dim = fields.whole("head_dim", head_dim) if has_groups else head_dim
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=has_bias,
        o_bias=has_bias,
    )


def usual_head_dim(hidden_size: int, num_heads: int) -> int:
    """Return the size of heads that divide the hidden size."""
    if hidden_size < num_heads:
        raise ConfigError(f"config.json: a hidden size of {hidden_size} is not enough for {num_heads} attention heads")
    return hidden_size // num_heads


def decoder(
    architecture: str,
    fields: JsonFields,
    layers: Iterable[Layer],
    final_norm: Norm | None,
    max_model_len: int,
    names: Names = _USUAL,
    *,
    is_tied: bool = False,
) -> Decoder:
    """Return a plain decoder.

    Args:
        architecture: its name in config.json.
        fields: config.json.
        layers: all of them.
        final_norm: after them.
        max_model_len: the limit of its positions.
        names: of the weights.
        is_tied: whether the head is the embedding, unless config.json has it.
    """
    return Decoder(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        layers=tuple(layers),
        final_norm=final_norm,
        tied_embeddings=fields.flag("tie_word_embeddings", is_tied),
        max_model_len=max_model_len,
        checkpoint_dtype=dtype(fields),
        names=names,
    )


def num_layers(fields: JsonFields) -> int:
    """How many layers there are."""
    return fields.whole("num_hidden_layers", most=MAX_LAYERS)


def activation(fields: JsonFields, name: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation of the MLPs."""
    found = fields.text(name) or default
    if found not in _ACTIVATIONS:
        raise ConfigError(f"config.json: {name} {found[:64]!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[found]


def sigmoid_router(fields: JsonFields, *, top_k: int) -> Router:
    """Return a router as in DeepSeek-V3. Defaults: one group, no scale, and `top_k`."""
    return Router(
        kind="sigmoid",
        top_k=fields.whole("num_experts_per_tok", top_k),
        renormalize=fields.flag("norm_topk_prob", True),
        renormalize_eps=1e-20,
        has_correction=True,
        num_groups=fields.whole("n_group", 1),
        top_groups=fields.whole("topk_group", 1),
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def dtype(fields: JsonFields) -> str:
    """The dtype of the weights, as torch calls it."""
    name = (fields.text("dtype") or fields.text("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"config.json: dtype {name[:64]!r} is not supported; supported: {', '.join(_DTYPES)}")
    return name


def every(interval: int, num_layers: int) -> Sequence[str]:
    """Return types of layers: every `interval`-th has full attention, the others a window."""
    return ["sliding_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]


def layer_types(fields: JsonFields, num_layers: int, default: Sequence[str]) -> Sequence[str]:
    """Return full or sliding attention for each layer; `default` if config.json does not have it.

    Raises:
        ConfigError: it does not cover each layer, or has another value.
    """
    types = fields.texts("layer_types")
    if types is None:
        return default
    if len(types) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in types):
        raise ConfigError(
            f"config.json: layer_types must name full_attention or sliding_attention {num_layers} times, "
            f"got {len(types)} names: {', '.join(sorted(set(map(shown, types)))[:4])}"
        )
    return types


def window(fields: JsonFields, default: int | None) -> int | None:
    """Return the width of windows; null in config.json means none."""
    if not fields.has("sliding_window"):
        return default
    return None if fields.raw("sliding_window") is None else fields.whole("sliding_window")


def windows(fields: JsonFields, num_layers: int, usual: Sequence[str], default: int) -> tuple[int | None, ...]:
    """Return each layer's window from the layers' types, which are `usual` unless config.json has others."""
    types, width = layer_types(fields, num_layers, usual), window(fields, default)
    return tuple(width if kind == "sliding_attention" else None for kind in types)


def softcap(fields: JsonFields, name: str, default: float) -> float:
    """Return a softcap; 0 if config.json has null."""
    return fields.number(name, 0.0 if fields.has(name) else default)


def rotates(fields: JsonFields) -> list[bool]:
    """Return whether each layer rotates q and k; by default all but every fourth do."""
    count = num_layers(fields)
    said = fields.raw("no_rope_layers")
    if said is None:
        interval = fields.whole("no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(count)]
    if not isinstance(said, list) or len(said) != count or any(flag not in (0, 1) for flag in said):
        raise ConfigError(f"config.json: no_rope_layers must be a list of {count} times 0 or 1")
    return [bool(flag) for flag in said]
