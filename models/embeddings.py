"""How a checkpoint makes text embeddings: sentence-transformers' modules, which any model may have."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from penstock.config.groups.frontend import FrontendOptions
from penstock.config.options import ConfigError
from penstock.models.description.encoder import Encoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.files.source import Checkpoint
from penstock.models.parsing.json_fields import JsonFields, shown

PoolingKind = Literal["last", "mean", "cls", "max", "weighted_mean", "mean_sqrt_len"]
DenseActivation = Literal["identity", "tanh", "relu", "sigmoid", "gelu", "silu"]

_ENDLESS = 1 << 30
_MODES: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}
_NEW_MODES = {
    "mean": "mean_tokens",
    "cls": "cls_token",
    "max": "max_tokens",
    "weightedmean": "weightedmean_tokens",
}
_SERVED = "Transformer, Pooling (of the first or last token, a mean or the maximum of all), Dense and Normalize"
_MODEL_TYPES = ("SentenceTransformer", "CrossEncoder")
_ACTIVATIONS: dict[str, DenseActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
    "GELU": "gelu",
    "SiLU": "silu",
}


class Dense(NamedTuple):
    """A product behind the pooling: activation(W x + b)."""

    number: int  # of the module
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: DenseActivation


class Embeddings(NamedTuple):
    """How a text becomes a vector."""

    kind: PoolingKind = "last"
    is_normalized: bool = True
    hidden_size: int = 0  # size of a full vector; 0: unknown
    max_len: int = 0  # tokens of the longest text; 0: the context
    prompts: Mapping[str, str] = {}  # what is put before a text, by name
    default_prompt: str = ""  # the name of the prompt that is used if none is named; "": none is
    is_lower: bool = False  # texts are put into lower case first


def embeddings_of(checkpoint: Checkpoint, options: FrontendOptions, model: ModelConfig | None = None) -> Embeddings:
    """Return the options' settings, or else the checkpoint's.

    Without either, decoders' vectors are the last token's and encoders' the mean of all, as in sentence-transformers;
    all have length 1.

    Raises:
        ConfigError: a module or pooling mode of the checkpoint is not supported, and no option replaces it.
    """
    kind: PoolingKind = "mean" if isinstance(model, Encoder) else "last"
    is_normalized, is_lower = True, False
    modules = checkpoint.embedding_modules()
    size, max_len = _hidden_size(checkpoint), 0
    if modules or isinstance(model, Encoder):
        max_len = _longest(checkpoint)
    model_type = checkpoint.embedding_config.get("model_type", "SentenceTransformer")
    if model_type not in _MODEL_TYPES and options.pooling == "auto":
        raise ConfigError(
            f"config_sentence_transformers.json: model_type {shown(str(model_type))} is not supported, only "
            f"{' and '.join(_MODEL_TYPES)}: a text has one dense vector, so the model's scores cannot be had; "
            "--pooling makes plain vectors of it"
        )
    if modules and not any(name == "LogitScore" for name, _ in modules):
        names = [name for name, _ in modules]
        if "Dense" in names and "Pooling" not in names and options.pooling == "auto":
            raise ConfigError(
                "modules.json has a Dense module and no Pooling: its vectors are those of tokens (as ColBERT's), which "
                "are not supported; --pooling pools them"
            )
        is_normalized = any(name == "Normalize" for name, _ in modules)
        for name, settings in modules:
            if name == "Pooling" and options.pooling == "auto":
                if settings.get("include_prompt") is False:
                    raise ConfigError(
                        "the Pooling module leaves out the tokens of prompts (include_prompt: false), which is not "
                        "supported; --pooling mean includes them"
                    )
                kind = _kind_of({key: value for key, value in settings.items() if value})
            elif name == "Transformer":
                fields = JsonFields("sentence_bert_config.json", settings)
                max_len, is_lower = fields.whole("max_seq_length", max_len, least=0), fields.flag("do_lower_case")
            elif name not in ("Pooling", "Dense", "Normalize") and options.pooling == "auto":
                raise ConfigError(
                    f"modules.json: the module {shown(name)} is not supported, only sentence-transformers' {_SERVED}; "
                    "--pooling last, mean, cls or max ignores it"
                )
        for dense in dense_modules(checkpoint):
            size = dense.num_outputs
    if options.pooling != "auto":
        kind = options.pooling
    prompts, default = _prompts(checkpoint)
    return Embeddings(kind, is_normalized, size, max_len, prompts, default, is_lower)


def dense_modules(checkpoint: Checkpoint) -> list[Dense]:
    """Return the Dense modules of modules.json, in their order.

    Raises:
        ConfigError: one of them computes something that is not supported.
    """
    found = []
    for number, (name, settings) in enumerate(checkpoint.embedding_modules()):
        if name == "Dense":
            fields = JsonFields("modules.json: Dense", settings)
            activation = fields.text("activation_function", "Tanh").rpartition(".")[2]
            if activation not in _ACTIVATIONS:
                known = ", ".join(_ACTIVATIONS)
                raise ConfigError(f"modules.json: Dense with {shown(activation)} is not supported; supported: {known}")
            for name in ("module_input_name", "module_output_name"):
                if (of := fields.text(name, "sentence_embedding")) != "sentence_embedding":
                    raise ConfigError(f"modules.json: Dense with {name} {shown(of)} is not supported")
            sizes = fields.whole("in_features"), fields.whole("out_features")
            found.append(Dense(number, *sizes, fields.flag("bias", True), _ACTIVATIONS[activation]))
    return found


def logit_tokens(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Return the tokens whose logits say no and yes, of a reranker that is a language model; None if it is none.

    Raises:
        ConfigError: the module lacks one of them.
    """
    settings = next((settings for name, settings in checkpoint.embedding_modules() if name == "LogitScore"), None)
    if settings is None:
        return None
    fields = JsonFields("modules.json: LogitScore", settings)
    if fields.raw("false_token_id") is None:
        raise ConfigError("modules.json: LogitScore without false_token_id is not supported")
    return fields.whole("false_token_id", least=0), fields.whole("true_token_id", least=0)


def _longest(checkpoint: Checkpoint) -> int:
    """Return the tokenizer's own limit; 0 if it has none, for which transformers writes an enormous number."""
    found = checkpoint.tokenizer_config.get("model_max_length")
    return found if isinstance(found, int) and 0 < found < _ENDLESS else 0


def _prompts(checkpoint: Checkpoint) -> tuple[dict[str, str], str]:
    fields = JsonFields("config_sentence_transformers.json", checkpoint.embedding_config)
    said = fields.object("prompts")
    prompts = {} if said is None else {name: said.text(name) for name in said.names()}
    default = fields.text("default_prompt_name")
    if default and default not in prompts:
        raise ConfigError(
            f"config_sentence_transformers.json: default_prompt_name {shown(default)} is none of its prompts: "
            f"{', '.join(prompts) or 'there are none'}"
        )
    return prompts, default


def _kind_of(settings: dict[str, Any]) -> PoolingKind:
    asked = [name for name in settings if name.startswith("pooling_mode_")]
    if isinstance(named := settings.get("pooling_mode"), str):  # in newer files
        asked = [f"pooling_mode_{_NEW_MODES.get(named, named)}"]
    if len(asked) == 1 and asked[0] in _MODES:
        return _MODES[asked[0]]
    said = " and ".join(asked) or "no pooling_mode"
    raise ConfigError(
        f"the Pooling module says {shown(said)}; vectors are pooled by one of {', '.join(_MODES)}: "
        "--pooling last, mean, cls or max takes one of these"
    )


def _hidden_size(checkpoint: Checkpoint) -> int:
    config = checkpoint.config
    for fields in (config, config.get("text_config")):
        for name in ("hidden_size", "n_embd", "d_model"):
            found = fields.get(name) if isinstance(fields, dict) else None
            if isinstance(found, int) and found > 0:
                return found
    return 0
