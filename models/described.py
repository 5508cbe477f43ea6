"""The description of a checkpoint's model, from its config.json and the layouts of its tensors."""

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from penstock.config.options import ModelImpl
from penstock.models.description.decoder import Decoder, Experts
from penstock.models.description.model_config import ModelConfig
from penstock.models.description.names import ExpertLayout, Names
from penstock.models.families.registry import family_of, parse_model_config
from penstock.models.files.source import Checkpoint, StoredTensor
from penstock.models.parsing.text_part import name_in_text_part
from penstock.models.quantization import with_quantization


def model_config_of(
    checkpoint: Checkpoint, impl: ModelImpl = "auto", quantization: str = "", *, with_weights: bool = True
) -> ModelConfig:
    """Return the configuration of the model that is served.

    Args:
        checkpoint: the model's.
        impl: as in `parse_model_config`.
        quantization: as in `with_quantization`.
        with_weights: whether there are weights, which show the layout of a mixture's experts, and of convolutions.

    Raises:
        ConfigError: for what is not supported.
        LoadError: there are no weights, or they cannot be read.
    """
    config = with_quantization(parse_model_config(checkpoint.config, impl), quantization)
    if with_weights and isinstance(config, Decoder) and _lacks_head(config, checkpoint):
        config = replace(config, tied_embeddings=True, draws_tokens=False)
    if not with_weights or not isinstance(config, Decoder):
        return config
    if _first_mixture(config) is None and len(config.names.recurrent_conv) == 1:
        return config
    stored = checkpoint.tensors()
    known = {name: stored[own] for name, own in own_names_of(stored, config).items()}
    names = replace(
        config.names, experts=expert_layout(config, known), recurrent_conv=_convolutions(config.names, known)
    )
    return replace(config, names=names)


def _lacks_head(config: Decoder, checkpoint: Checkpoint) -> bool:
    """Whether an embedding model was stored without the matrix of logits that its architecture has."""
    if config.tied_embeddings or not checkpoint.embedding_modules():
        return False
    return f"{config.names.head}.weight" not in own_names_of(checkpoint.tensors(), config)


def own_names_of(stored: Iterable[str], config: ModelConfig) -> dict[str, str]:
    """Return the checkpoint's own names of tensors by the model's names; unknown tensors are left out."""
    known_as = family_of(config).known_as
    vision = config.vision if isinstance(config, Decoder) else None
    of_part: Callable[[str], str | None] = name_in_text_part if config.text_part_of or vision is not None else str

    def known(name: str) -> str | None:
        if vision is not None and (of_tower := vision.name_of(name)) is not None:
            return of_tower  # the family knows the text part's names only
        of_text = of_part(name)
        return None if of_text is None else known_as(of_text)

    return {found: name for name in stored if (found := known(name)) is not None}


def expert_layout(decoder: Decoder, stored: Mapping[str, StoredTensor]) -> ExpertLayout:
    """Return the layout of the experts in these tensors (by the model's names); the usual one if there are none."""
    usual, found = decoder.names.experts, _first_mixture(decoder)
    if found is None:
        return usual
    number, experts = found
    start = decoder.names.layer.format(number) + decoder.names.start_of_experts
    parts = {name.removeprefix(start): its for name, its in stored.items() if name.startswith(start)}
    if any(part[:1].isdigit() for part in parts):
        return "apart"
    if not any(part.startswith("down_proj") for part in parts):
        return usual
    inner, hidden = experts.size * (1 + experts.is_gated), decoder.hidden_size
    gate_up = "gate_up_proj" if experts.is_gated else "up_proj"
    shapes = tuple(parts[name].shape[1:] if name in parts else () for name in (gate_up, "down_proj"))
    # Gates and ups are twice as wide as downs: one of the two shapes decides, whatever the hidden size.
    fitting: dict[ExpertLayout, bool] = {
        "joined": shapes == ((inner, hidden), (hidden, experts.size)),
        "turned": shapes == ((hidden, inner), (experts.size, hidden)),
    }
    if fitting.get(usual):
        return usual
    return next((layout for layout, fits in fitting.items() if fits), usual if usual != "apart" else "joined")


def _convolutions(names: Names, stored: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """Return the names of convolutions: of several as published, or of the one that transformers makes of them."""
    if len(names.recurrent_conv) == 1:
        return names.recurrent_conv
    joined = f"{names.recurrent_conv[0].rpartition('.')[0]}.conv1d"
    return (joined,) if any(name.endswith(f".{joined}.weight") for name in stored) else names.recurrent_conv


def _first_mixture(decoder: Decoder) -> tuple[int, Experts] | None:
    """Return the first layer with experts, with its number."""
    for number, layer in enumerate(decoder.layers):
        mlp = layer.mlp if layer.beside_mlp is None else layer.beside_mlp.experts
        if isinstance(mlp, Experts):
            return number, mlp
    return None
