"""An adapter in one file, as llama.cpp's convert_lora_to_gguf.py writes it.

Each matrix W of the model has two tensors, NAME.lora_a [rank, inputs] and NAME.lora_b [outputs, rank], where NAME is
W's in a model's file. Outputs are in the order that they have there, so rows of lora_b are turned back as W's are.
"""

from typing import NamedTuple

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Attention, Decoder
from penstock.models.files.source import StoredTensor
from penstock.models.gguf.architectures import architecture_of
from penstock.models.gguf.container import Container
from penstock.models.gguf.tensors import transformers_rows
from penstock.models.parsing.json_fields import JsonFields

_HALVES = (".lora_a", ".lora_b")


class AdapterFile(NamedTuple):
    """The contents of a file."""

    alpha: float  # the scale is alpha / rank; 0: it is 1
    matrices: dict[str, tuple[StoredTensor, StoredTensor]]
    """[rank, inputs] and [outputs, rank] by transformers' names of the matrices; unknown names are GGUF's."""


def adapter_file(container: Container, decoder: Decoder) -> AdapterFile:
    """Read what a file says of the matrices of a model.

    Raises:
        ConfigError: it is no adapter, or has what is not supported.
    """
    fields = JsonFields("the GGUF file", container.metadata)
    kind, method = fields.text("general.type", ""), fields.text("adapter.type", "")
    if kind != "adapter":
        raise ConfigError(f"its general.type is {kind[:64]!r}; that of an adapter is 'adapter'")
    if method != "lora":
        raise ConfigError(f"its adapter.type is {method[:64]!r}; 'lora' is served")
    if fields.has("adapter.alora.invocation_tokens"):
        raise ConfigError("it was trained with adapter.alora.invocation_tokens, which is not supported")
    architecture = architecture_of(fields.text("general.architecture"))
    if architecture.pairs_are_neighbours and not isinstance(decoder.layers[0].mixer, Attention):
        raise ConfigError("it belongs to another model: this one has no attention in its first layer")
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in container.tensors.items():
        half = next((each for each in _HALVES if name.endswith(each)), "")
        if not half:
            raise ConfigError(f"its tensor {name[:128]!r} is not supported: only those of linear layers are")
        halves.setdefault(name.removesuffix(half), {})[half] = tensor
    matrices: dict[str, tuple[StoredTensor, StoredTensor]] = {}
    for name, its in halves.items():
        if its.keys() != set(_HALVES):
            raise ConfigError(f"one of the two matrices of {name[:128]!r} is missing")
        a, b = (its[half] for half in _HALVES)
        matrices |= {each: (a, rows) for each, rows in transformers_rows(name, b, decoder, architecture).items()}
    return AdapterFile(fields.number("adapter.lora.alpha", 0.0), matrices)
