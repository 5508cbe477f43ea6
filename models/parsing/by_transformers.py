"""Architectures without a family of their own, which `transformers`' modelling code computes.

Only the worker imports `transformers`, which takes seconds and imports torch, too. Here its list of architectures is
read from its source text, in milliseconds.
"""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from penstock.config.options import ConfigError
from penstock.models.description.model_config import KVShape, ModelConfig
from penstock.models.parsing.decoders import dtype
from penstock.models.parsing.family import Family
from penstock.models.parsing.json_fields import JsonFields, shown

_LISTS = "models/auto/modeling_auto.py"
_OF_TEXTS, _OF_IMAGES = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local"}
_DEFAULT_LENGTH = 2048
_MAX_KINDS = 4  # most kinds that a message names


class UnsupportedError(ConfigError):
    """`transformers` has the architecture, but its code cannot compute over pages."""


class TransformersConfig(ModelConfig, frozen=True, kw_only=True):
    """The fields of config.json under the names that most architectures share.

    The shapes of keys and values are the usual ones; the model that the worker builds has the actual ones.
    """

    hidden_size: int
    shapes: tuple[KVShape, ...]

    @property
    def kv(self) -> tuple[KVShape, ...]:
        return self.shapes

    @property
    def num_step_weights(self) -> int:
        """An estimate, as in most decoders: 12 matrices of hidden_size squared per layer, and the head."""
        return self.hidden_size * (12 * self.num_layers * self.hidden_size + self.vocab_size)


@cache
def architectures() -> dict[str, str]:
    """Return the causal language models of the installed `transformers`, with their types; empty if not installed."""
    return {name: kind for kind, name in _listed(_OF_TEXTS)}


def seeing_types() -> dict[str, str]:
    """Return the types of the installed `transformers` that take images and texts, with their architectures."""
    return dict(_listed(_OF_IMAGES))


def _listed(name: str) -> list[tuple[str, str]]:
    """Return the types in one of the lists of `transformers`, each with its architecture."""
    for node in ast.parse(source_text(_LISTS)).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            pairs = (pair.elts for pair in ast.walk(node.value) if isinstance(pair, ast.Tuple) and len(pair.elts) == 2)
            return [(str(ast.literal_eval(kind)), str(ast.literal_eval(its))) for kind, its in pairs]
    return []


def source_text(file: str) -> str:
    """Return a source file of `transformers`; empty if there is none."""
    spec = find_spec("transformers")
    path = Path(spec.origin).parent / file if spec is not None and spec.origin is not None else None
    return path.read_text() if path is not None and path.exists() else ""


@cache
def computes_by_transformers(architecture: str) -> bool:
    """Return whether the model accepts an external attention function.

    True, too, if its class is not in the file where it should be: then the worker finds out when it builds the model.
    """
    kind = architectures()[architecture].replace("-", "_")
    source = source_text(f"models/{kind}/modeling_{kind}.py")
    return f"class {architecture}(" not in source or "_supports_attention_backend = True" in source


@cache
def names_other_layers(architecture: str) -> bool:
    """Return whether the architecture's configuration has layers that keep more than keys and values, if only some."""
    kind = architectures()[architecture].replace("-", "_")
    source = source_text(f"models/{kind}/configuration_{kind}.py")
    return bool(set(re.findall(r'"([a-z_]+_attention)"', source)) - _ATTENTION)


def layers_without_kv(fields: JsonFields) -> list[str]:
    """Return the kinds of layers in config.json that keep something other than keys and values."""
    return sorted(map(shown, set(fields.texts("layer_types") or ()) - _ATTENTION))[:_MAX_KINDS]


def parse(architecture: str, fields: JsonFields) -> TransformersConfig:
    """Like `Family.parse`.

    Raises:
        UnsupportedError: the model keeps more than keys and values, or does not accept external attention.
        ConfigError: for a setting that is not supported, or a field of the wrong type.
    """
    if not computes_by_transformers(architecture):
        raise UnsupportedError(
            f"architecture {architecture} is not supported yet: transformers does not let others compute its attention"
        )
    if fields.raw("text_config") is not None and not any(fields.raw(name) for name in _LAYERS):
        raise UnsupportedError(
            f"architecture {architecture} is not supported yet: config.json describes its text part in text_config, "
            "and transformers' code is used for models without other parts only"
        )
    num_layers = _first(fields, _LAYERS, None)
    num_heads = _first(fields, _HEADS, 1)
    num_kv_heads = fields.whole("num_key_value_heads", num_heads)
    if kinds := layers_without_kv(fields):
        raise UnsupportedError(
            f"architecture {architecture} has layers of kind {', '.join(kinds)}, which are not supported yet: "
            "only layers that keep keys and values are"
        )
    hidden_size = fields.whole("hidden_size", fields.whole("n_embd", num_heads))
    head_dim = fields.whole("head_dim", max(1, hidden_size // num_heads))
    return TransformersConfig(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        shapes=(KVShape(num_kv_heads, head_dim, head_dim, None),) * num_layers,
        max_model_len=_max_model_len(fields),
        checkpoint_dtype=dtype(fields),
        hidden_size=hidden_size,
    )


def _max_model_len(fields: JsonFields) -> int:
    """Return the length up to which positions mean the same in every batch.

    With these two kinds of rotary embedding, `transformers` lets the longest row of a batch decide for all rows. Models
    with chunked attention define the chunks only by masks, which are not used here.
    """
    longest = _first(fields, _LENGTHS, _DEFAULT_LENGTH)
    rope = fields.object("rope_parameters") or fields.object("rope_scaling")
    kind = rope and (rope.text("rope_type") or rope.text("type"))
    if rope and kind in ("longrope", "dynamic"):
        trained = fields.whole("original_max_position_embeddings", longest)
        longest = min(longest, rope.whole("original_max_position_embeddings", trained))
    return min(longest, fields.whole("attention_chunk_size", longest))


def _first(fields: JsonFields, names: tuple[str, ...], default: int | None) -> int:
    name = next((name for name in names if fields.raw(name) is not None), names[0])
    return fields.whole(name, default)


BY_TRANSFORMERS: Family[TransformersConfig] = Family(
    architectures=(),
    parse=parse,
    tensors=None,
    matrices=lambda config: {},
    ignores=lambda name, config: True,
    known_as=str,
    build="penstock.gpu_worker.models.transformers_model:build",
)
