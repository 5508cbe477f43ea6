"""Processors of models whose vision tower `transformers` computes: its own makes pixel values and placeholders.

Which text stands for an image says that processor, and with it how many tokens an image has. Only the process of
`read.py` calls it.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from penstock.config import ConfigError
from penstock.models.files.source import Checkpoint
from penstock.parts.images.child.decode import ImageRefusedError
from penstock.parts.images.child.processor import FAILURES, ProcessedImage, key_of, plain, refused
from penstock.parts.images.families import NUMBER, ImageFamily, Placeholder
from penstock.parts.images.processor_files import ProcessorFiles

_OF_WHOLE = ("feature_extractor", "image_processor", "processor_class", "video_processor")
"""Fields of processor_config.json that are no settings of the processor itself."""
_OF_TOKENIZER = ("processor_class", "tokenizer_class", "chat_template", "auto_map")


class ForeignProcessor:
    """As `ImageProcessor`."""

    def __init__(self, checkpoint: Checkpoint, family: ImageFamily) -> None:
        """Load the processor's class.

        Raises:
            ConfigError: `transformers` has no such processor that works without torch, or it does not take the
                checkpoint's settings.
        """
        self._token, self._has_grid, self._has_others = family.token, family.has_grid, bool(family.other_tokens)
        self._one = "|".join(map(re.escape, (family.token, *family.other_tokens)))
        self._run = f"(?:{self._one})+"
        self._kind = "pt" if family.needs_torchvision else "np"
        try:
            its = self._processor = _made(checkpoint.path, ProcessorFiles(checkpoint))
            merged = its._merge_kwargs(tokenizer_init_kwargs=its.tokenizer.init_kwargs, return_tensors=self._kind)
            known = inspect.signature(its._process_images).parameters  # some want settings of the whole processor, too
            marks = its.image_token, getattr(its, "image_placeholder_token", None)
        except FAILURES as error:
            first = str(error).strip().partition("\n")[0]
            raise ConfigError(f"transformers' image processor of this model cannot be used: {first[:200]}") from None
        if family.mark not in marks:
            raise ConfigError(f"the processor's mark for an image is {marks[0]!r}, not {family.mark!r}")
        self._arguments = {name: value for name, value in merged.items() if name in known} | merged["images_kwargs"]

    def process(self, image: Image.Image) -> ProcessedImage:
        """As `ImageProcessor.process`."""
        try:
            outputs, (text,) = self._processor._process_images([image], **self._arguments)
            unused = self._processor.unused_input_names
            tensors = {name: plain(_array(its)) for name, its in outputs.items() if name not in unused}
        except FAILURES as error:
            raise refused(image, error) from None
        placed = [re.findall(self._one, run) for run in re.findall(self._run, text)]
        if not placed:
            raise ImageRefusedError("it is too small: the model would see nothing of it")
        if self._has_others:  # the tower makes something else for each of them
            ids = [self._processor.tokenizer.convert_tokens_to_ids(token) for run in placed for token in run]
            tensors["input_ids"] = np.array([ids], np.int64)
        runs, short = tuple(map(len, placed)), re.sub(self._run, lambda run: self._token, text)
        if getattr(self._processor, "default_use_image_id", False):
            short = f"{self._processor.image_id_start_token}{NUMBER}{self._processor.image_id_end_token}{short}"
        grid = tuple(map(int, tensors["image_grid_thw"][0])) if self._has_grid else (sum(runs),)
        placeholder = Placeholder(short, runs, grid)
        return ProcessedImage(key_of(tensors, grid), placeholder, tensors)


def _array(values: Any) -> np.ndarray:
    """What a processor made; a tensor of a type that numpy lacks becomes one of floats."""
    return (
        values.float().numpy()
        if hasattr(values, "is_floating_point") and values.is_floating_point()
        else np.asarray(values)
    )


class _Nothing:
    """In place of the parts for videos and sound, whose settings some processors copy."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _made(path: Path, said: ProcessorFiles) -> Any:
    """The processor, with the checkpoint's tokenizer and image processor, and nothing for other senses."""
    transformers: Any = importlib.import_module("transformers")

    image_processing_auto: Any = importlib.import_module("transformers.models.auto.image_processing_auto")
    processing_auto: Any = importlib.import_module("transformers.models.auto.processing_auto")
    kind = str(said.config.get("model_type"))
    name = said.processor.get("processor_class") or said.tokens.get("processor_class")
    name = str(name or processing_auto.PROCESSOR_MAPPING_NAMES.get(kind))
    usual = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(kind) or {}
    of_image = said.image_class(usual.get("pil") or "")
    make = processing_auto.processor_class_from_name(name)
    found = map(image_processing_auto.get_image_processor_class_from_name, (f"{of_image}Pil", of_image))
    make_image = next(filter(None, found), None)
    if make is None or make_image is None:
        raise ConfigError(f"transformers has no {name if make is None else of_image}")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"),
        **{field: value for field, value in said.tokens.items() if field not in _OF_TOKENIZER},
    )
    parts: dict[str, Any] = {"tokenizer": tokenizer, "image_processor": make_image.from_dict(dict(said.image))}
    settings = {field: value for field, value in said.processor.items() if field not in _OF_WHOLE}

    class OfImages(make):  # type: ignore[misc, valid-type]
        """Without what checks that parts are there which images do not need."""

        def check_argument_for_proper_class(self, name: str, value: Any) -> None:
            pass

    others = dict.fromkeys(set(make.get_attributes()) - parts.keys(), _Nothing())
    return OfImages(**parts, **others, **settings)
