"""Each architecture's description and weights from a file of llama.cpp's converter, against those it was made of."""

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from docs import gguf_table
from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.models.loading import loader
from penstock.gpu_worker.models.loading.decoder_build import from_latent
from penstock.gpu_worker.models.loading.loader import load_model
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.models.check import check_checkpoint
from penstock.models.description.decoder import Decoder, LatentAttention
from penstock.models.families.registry import expected_tensors, parse_model_config
from penstock.models.finding.registry import open_checkpoint
from penstock.models.gguf.architectures import ARCHITECTURES
from penstock.models.weights.decoder import LatentSources, decoder_sources
from penstock.models.weights.sources import Source
from tests.models.gguf.small_models import FILES, weight

_MODELS = sorted(path.name.removesuffix(".gguf.xz") for path in FILES.glob("*.gguf.xz"))
_NOT_IN_FILES = {"names", "quantization", "checkpoint_dtype"}
"""Of a description: what the form of the checkpoint decides."""


def unpacked(name: str, folder: Path) -> Path:
    """A file of `files/`, as it was made."""
    path = folder / f"{name}.gguf"
    path.write_bytes(lzma.decompress((FILES / f"{name}.gguf.xz").read_bytes()))
    return path


def _described(name: str) -> Decoder:
    config = parse_model_config(json.loads((FILES / f"{name.removesuffix('-q8_0')}.json").read_text()))
    assert isinstance(config, Decoder)
    return config


def _tensors(part: object, reader: WeightReader, decoder: Decoder) -> Iterator[Tensor]:
    """All weights, in the order in which blocks take them."""
    if isinstance(part, Source):
        yield reader.tensor(part)
    elif isinstance(part, LatentSources):
        mixer = decoder.layers[0].mixer
        assert isinstance(mixer, LatentAttention)
        yield from_latent(mixer, part.kv_b, reader)
        yield from _tensors(tuple(part._replace(kv_b=())), reader, decoder)
    elif isinstance(part, tuple):
        for each in part:
            yield from _tensors(each, reader, decoder)


def _weights(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, WeightReader]:
    """The description, and what the loader would read its weights with."""
    checkpoint = open_checkpoint(path)
    config = parse_model_config(checkpoint.config)
    monkeypatch.setattr(loader, "_build", lambda config, reader: reader)
    reader: Any = load_model(checkpoint, config, torch.float32, CpuDevice())
    assert isinstance(config, Decoder)
    return config, reader


def test_each_architecture_has_a_file() -> None:
    made = {_architecture(name) for name in _MODELS}
    assert made == set(ARCHITECTURES)


def _architecture(name: str) -> str:
    data = lzma.decompress((FILES / f"{name}.gguf.xz").read_bytes())
    key = b"general.architecture"
    begin = data.index(key) + len(key) + 4
    return data[begin + 8 : begin + 8 + int.from_bytes(data[begin : begin + 8], "little")].decode()


@pytest.mark.parametrize("name", _MODELS)
def test_the_description_is_that_of_config_json(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(unpacked(name, tmp_path))
    check_checkpoint(checkpoint, with_tokenizer=False)
    found = parse_model_config(checkpoint.config)
    expected = _described(name)
    for field in expected.__struct_fields__:
        if field not in _NOT_IN_FILES:
            assert getattr(found, field) == getattr(expected, field), field


@pytest.mark.parametrize("name", _MODELS)
def test_weights_are_those_of_the_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights, made from either's tensors, in the order in which blocks take them."""
    config, reader = _weights(unpacked(name, tmp_path), monkeypatch)
    expected = _described(name)
    shapes = expected_tensors(expected) or {}
    original = WeightReader(lambda its, _: weight(its, shapes[its]), False, torch.float32, torch.device("cpu"))
    ours = _tensors(decoder_sources(config), reader, config)
    theirs = _tensors(decoder_sources(expected), original, expected)
    for found, wanted in zip(ours, theirs, strict=True):
        # Q8_0 rounds to a 127th of the largest number of a block, 2, or half of that.
        bound = 2 / 127 / 2 + 2**-10 if name.endswith("q8_0") and found.dim() > 1 else 2**-24
        assert float((found - wanted).abs().max()) <= bound


def test_the_page_shows_what_the_code_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gguf_table", "--check"])
    assert gguf_table.main() == 0
