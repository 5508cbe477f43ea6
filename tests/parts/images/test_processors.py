"""Placeholders and pixel values are those of transformers' processors, for images of any size."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch  # noqa: F401 (before transformers' processors: in this process others need it)

from penstock.config import ConfigError
from penstock.models.files.folder import HuggingFaceFolder
from penstock.models.finding.registry import open_checkpoint
from penstock.parts.images.child.decode import ImageRefusedError
from penstock.parts.images.child.foreign import ForeignProcessor
from penstock.parts.images.child.processor import ImageProcessor
from penstock.parts.images.families import image_family_of
from penstock.parts.images.frontend.prompt import expanded, with_placeholders
from tests.gpu_worker.families import foreign_eyes
from tests.gpu_worker.families.foreign_eyes import FOREIGN_EYES
from tests.parts.images.image_models import MODELS, noise

_TEXTS = ("Look: {0}", "{0}{1}\n\n", "a\n{0}\n{1}\n{2} and what is it?", "{0}{0}")


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_pixel_values_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, draw = MODELS[name], random.Random(name)
    family = image_family_of(HuggingFaceFolder(model.write(tmp_path)))
    assert family is not None
    assert family.mark == model.mark
    processor, oracle = ImageProcessor(family), model.oracle()
    tokenizer = oracle.tokenizer
    token_id = tokenizer.convert_tokens_to_ids(family.token)
    for text in _TEXTS:
        text = text.replace("{0}", model.mark).replace("{1}", model.mark).replace("{2}", model.mark)
        sizes = [(draw.randint(20, 400), draw.randint(20, 400)) for _ in range(text.count(model.mark))]
        images = [noise(*size, seed) for seed, size in enumerate(sizes)]
        expected_ids, expected_pixels = model.expected(oracle, text, images)
        made = [processor.process(image) for image in images]
        placeholders = [image.placeholder for image in made]
        short = tokenizer(with_placeholders(text, family.mark, placeholders), add_special_tokens=False)["input_ids"]
        token_ids, spans = expanded(short, token_id, placeholders)
        assert token_ids == expected_ids, sizes
        for image, pixels, span in zip(made, expected_pixels, spans, strict=True):
            assert np.array_equal(image.tensors["pixel_values"], pixels)
            inside = token_ids[span.start : span.start + span.length]
            assert inside[0] == inside[-1] == token_id
            assert inside.count(token_id) == sum(image.placeholder.runs) == span.num_embeddings


def test_images_are_told_apart_by_what_the_tower_sees(tmp_path: Path) -> None:
    family = image_family_of(HuggingFaceFolder(MODELS["qwen2-vl"].write(tmp_path)))
    assert family is not None
    processor = ImageProcessor(family)
    one, same, other = noise(90, 60), noise(90, 60), noise(90, 60)
    other.putpixel((3, 3), (0, 0, 0))
    turned = noise(90, 60).resize((60, 90))
    keys = [processor.process(image).key for image in (one, same, other, turned)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize("said", [[56, 112], [[56]], "all", [["wide", 56]]])
def test_resolutions_that_are_none_are_told_at_the_start(tmp_path: Path, said: Any) -> None:
    family = MODELS["llava-next"]
    folder = replace(family, image={**family.image, "image_grid_pinpoints": said}).write(tmp_path)
    with pytest.raises(ConfigError, match="image_grid_pinpoints must be pairs of sizes"):
        image_family_of(open_checkpoint(folder))


def test_settings_of_other_types_are_told_and_end_nothing(tmp_path: Path) -> None:
    """Whatever transformers' code raises: the process goes on, and says that it is the model that takes no image."""
    model = MODELS["qwen2-vl"]
    family = image_family_of(open_checkpoint(replace(model, settings={"processor_class": ["x"]}).write(tmp_path)))
    assert family is not None
    for name, value in (("patch_size", "x"), ("merge_size", None), ("size", [])):
        with pytest.raises((ConfigError, ImageRefusedError)):
            ImageProcessor(replace(family, settings={**family.settings, name: value})).process(noise(60, 40))


def test_settings_of_other_types_in_towers_of_transformers(tmp_path: Path) -> None:
    def write(file: str, **changes: Any) -> None:
        eyes = FOREIGN_EYES["internvl"]
        kinds = {"preprocessor_config": {"image_processor_type": eyes.image_processor, **eyes.image}}
        kinds["processor_config"] = {"processor_class": eyes.processor, **eyes.settings}
        for kind, content in kinds.items():
            content = {**content, **(changes if kind == file else {})}
            (tmp_path / f"{kind}.json").write_text(json.dumps(content))

    model, _ = foreign_eyes.write(tmp_path, "internvl")
    model.save_pretrained(tmp_path)
    for file, changes in (
        ("preprocessor_config", {"crop_size": []}),
        ("preprocessor_config", {"max_patches": "x"}),
        ("processor_config", {"image_seq_length": None}),
        ("processor_config", {"processor_class": "WhisperProcessor"}),
    ):
        write(file, **changes)
        checkpoint = open_checkpoint(tmp_path)
        family = image_family_of(checkpoint)
        assert family is not None
        with pytest.raises((ConfigError, ImageRefusedError)):
            ForeignProcessor(checkpoint, family).process(noise(60, 40))
