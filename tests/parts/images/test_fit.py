"""A processor that does not fit the vision tower is told at the start: by its files, without an image."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 (before transformers' processors: in this process others need it)
from tokenizers import Tokenizer

from penstock.config import ConfigError
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.finding.registry import open_checkpoint
from penstock.models.vision.kinds import Vision
from penstock.parts.images.child.decode import ImageRefusedError
from penstock.parts.images.child.processor import ImageProcessor
from penstock.parts.images.families import ImageFamily, image_family_of
from penstock.parts.images.frontend.fit import check_fit
from tests.parts.images.image_models import MODELS, ImageModel, noise

_SIZES = ((120, 80), (56, 56), (90, 200), (300, 310))


def fits(family: ImageFamily, vision: Vision) -> bool:
    """Whether the tower takes what the processor makes of some images, as the worker would check it."""
    try:
        processor = ImageProcessor(family)
    except ConfigError:
        return False
    for size in _SIZES:
        try:
            made = processor.process(noise(*size))
        except ImageRefusedError:
            return False
        placeholder, pixels = made.placeholder, made.tensors["pixel_values"]
        if vision.num_embeddings(placeholder.grid) != sum(placeholder.runs):
            return False
        if vision.pixel_shape(placeholder.grid) != pixels.shape:
            return False
    return True


def checked(model: ImageModel, folder: Path) -> tuple[bool, str]:
    """Whether images would go through, and what is said at the start."""
    checkpoint = open_checkpoint(model.write(folder))
    family, config = image_family_of(checkpoint), parse_model_config(checkpoint.config, "auto")
    assert family is not None
    assert isinstance(config, Decoder)
    assert config.vision is not None
    token = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(family.token)
    assert token is not None
    try:
        check_fit(checkpoint, family, token, config.vision)
    except ConfigError as error:
        return fits(family, config.vision), str(error)
    return fits(family, config.vision), ""


@pytest.mark.parametrize("name", MODELS)
def test_processors_that_fit(name: str, tmp_path: Path) -> None:
    assert checked(MODELS[name], tmp_path) == (True, "")


@pytest.mark.parametrize("name", MODELS)
def test_image_tokens_of_other_models(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    _, error = checked(replace(model, config={**model.config, "image_token_id": 7}), tmp_path)
    assert error.startswith("tokenizer.json: the image token ")
    assert "in config.json it is 7" in error


_IMAGE, _SETTINGS = "preprocessor_config.json", "processor_config.json"
_SQUARE = {"height": 28, "width": 28}


@pytest.mark.parametrize(
    ("name", "file", "field", "value", "said"),
    [
        ("qwen2-vl", _IMAGE, "patch_size", 16, "patch_size is 16, but by config.json the vision tower needs 14"),
        ("qwen2-vl", _IMAGE, "temporal_patch_size", 1, "temporal_patch_size is 1"),
        ("qwen2.5-vl", _IMAGE, "merge_size", 1, "merge_size is 1"),
        ("qwen3-vl", _IMAGE, "patch_size", 14, "the vision tower needs 16"),
        ("llava", _IMAGE, "crop_size", _SQUARE, "crop_size is [28, 28], but by config.json the vision tower needs [56"),
        ("llava", _SETTINGS, "patch_size", 28, "patch_size is 28"),
        ("llava", _SETTINGS, "num_additional_image_tokens", 0, "num_additional_image_tokens is 0"),
        ("llava", _SETTINGS, "vision_feature_select_strategy", "full", "vision_feature_select_strategy is full, but"),
        ("llava-next", _IMAGE, "crop_size", _SQUARE, "crop_size is [28, 28]"),
        ("llava-next", _IMAGE, "image_grid_pinpoints", [[56, 112]], "image_grid_pinpoints is ((56, 112),), but"),
        ("llava-next", _SETTINGS, "patch_size", 7, "patch_size is 7"),
        ("gemma3", _IMAGE, "size", {"height": 224, "width": 224}, "size is [224, 224]"),
        ("gemma3", _SETTINGS, "image_seq_length", 256, "image_seq_length is 256"),
        ("idefics3", _IMAGE, "max_image_size", {"longest_edge": 128}, "max_image_size is [128, 128]"),
        ("idefics3", _IMAGE, "max_image_size", "large", "max_image_size is ['large', 'large']"),
        ("gemma3", _IMAGE, "size", 1.5, "size is [1.5, 1.5]"),
        ("llava", _IMAGE, "crop_size", ["a"], "crop_size is ['a']"),
        ("idefics3", _SETTINGS, "image_seq_len", 169, "image_seq_len is 169, but by config.json the"),
        ("smolvlm", _SETTINGS, "image_seq_len", 64, "image_seq_len is 64"),
        ("pixtral", _SETTINGS, "patch_size", 14, "patch_size is 14"),
        ("mistral3", _SETTINGS, "spatial_merge_size", 1, "patch_size is 14, but by config.json the"),
    ],
)  # fmt: skip
def test_processors_that_do_not_fit(name: str, file: str, field: str, value: Any, said: str, tmp_path: Path) -> None:
    """Every one of them makes of some image what the tower does not take."""
    model = MODELS[name]
    broken = replace(model, image={**model.image, field: value})
    if file == _SETTINGS:
        broken = replace(model, settings={**model.settings, field: value})
    works, error = checked(broken, tmp_path)
    assert not works
    assert error.startswith(f"{file}: ")
    assert said in error


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llava", {"num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"}),
        ("llava", {"patch_size": 13}),
        ("mistral3", {"patch_size": 28, "spatial_merge_size": 1}),
    ],
)
def test_other_words_for_the_same_number_of_tokens_fit(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = MODELS[name]
    assert checked(replace(model, settings={**model.settings, **settings}), tmp_path) == (True, "")
