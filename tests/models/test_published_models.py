"""The configurations of published models parse to what their makers say of them: parameters, and KV for each token."""

import math

import pytest

from penstock.models.description.decoder import Decoder, Experts
from penstock.models.description.encoder import Encoder
from penstock.models.families.registry import ARCHITECTURES, parse_model_config
from penstock.models.weights.decoder import decoder_tensors
from penstock.models.weights.encoder import encoder_tensors
from tests.models.published_encoders import ENCODERS, PublishedEncoder
from tests.models.published_models import PUBLISHED, Published

_BF16 = 2
_WITHOUT_FIGURES = {"GraniteMoeSharedForCausalLM", "HyperCLOVAXForCausalLM"}
"""Only in research; and one whose published configurations were not at hand."""


def decoder_of(model: Published) -> Decoder:
    """What its configuration is parsed to."""
    config = parse_model_config({"architectures": [model.architecture], **model.fields}, "own")
    assert isinstance(config, Decoder)
    return config


def parameters(decoder: Decoder) -> int:
    """Of all tensors; a tied head is none."""
    return sum(math.prod(shape) for shape in decoder_tensors(decoder).values())


def kv_bytes(decoder: Decoder) -> int:
    """Of a position that all layers keep, in bf16."""
    return sum(kv.num_heads * (kv.key_dim + kv.value_dim) for kv in decoder.kv) * _BF16


def says(published: str, count: int) -> bool:
    """Whether a number rounds to the one that is printed, or is about it."""
    if published.startswith("~"):
        return math.isclose(count / 1e9, float(published[1:-1]), rel_tol=0.02)
    if published.endswith("B"):
        decimals = len(published[:-1].partition(".")[2])
        return f"{count / 1e9:.{decimals}f}" == published[:-1]
    return f"{count:,}" == published


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.name)
def test_sizes_are_the_published_ones(model: Published) -> None:
    decoder = decoder_of(model)
    count = parameters(decoder)
    assert says(model.parameters, count), f"{count:,}"
    assert kv_bytes(decoder) == model.kv_bytes
    mixtures = [isinstance(layer.mlp, Experts) or layer.beside_mlp is not None for layer in decoder.layers]
    assert bool(model.active) == any(mixtures)
    if model.active:
        embedding, with_head = decoder.vocab_size * decoder.hidden_size, decoder.num_step_weights
        counts = (with_head - embedding, with_head, with_head + embedding)
        assert any(says(model.active, count) for count in counts), counts


def test_every_architecture_is_there() -> None:
    assert {model.architecture for model in PUBLISHED} == set(ARCHITECTURES) - _WITHOUT_FIGURES


@pytest.mark.parametrize("model", ENCODERS, ids=lambda model: model.name)
def test_sizes_of_encoders(model: PublishedEncoder) -> None:
    config = parse_model_config({"architectures": [model.architecture], **model.fields}, "own")
    assert isinstance(config, Encoder)
    count = sum(math.prod(shape) for shape in encoder_tensors(config).values())
    assert math.isclose(count / 1e6, model.parameters, rel_tol=0.02), f"{count:,}"
    assert not config.draws_tokens
    assert config.num_classes == model.architecture.endswith("ForSequenceClassification")
