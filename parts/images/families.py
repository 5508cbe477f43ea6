"""The placeholders of images in prompts, by family of models, as transformers' processors write them.

A chat template writes a mark for each image. The processor replaces the mark by a text with many image tokens, whose
number depends on the image. Here that text has a single image token for each run, and the lengths of the runs are kept
beside it. An image token never joins with its neighbours, so runs can be expanded once the text is tokenized.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.files.source import Checkpoint
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.text_part import seeing_architecture
from penstock.models.parsing.vision.foreign import FOREIGN, image_token_of, other_tokens_of
from penstock.models.parsing.vision.towers import TOWERS
from penstock.models.vision.foreign import Foreign, ForeignVision
from penstock.models.vision.views import WholeThenTiles
from penstock.parts.images.processor_files import ProcessorFiles, token_texts

Outputs = Mapping[str, np.ndarray]
"""The outputs of an image processor for one image, by name."""


NUMBER = "\0"
"""In a placeholder's text: the image's number in the prompt, from 0."""


class Placeholder(NamedTuple):
    """The placeholder of one image."""

    text: str  # has one image token for each run
    runs: tuple[int, ...]
    grid: tuple[int, ...]  # as the vision tower needs it: patches (time, height, width), or sizes


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """How images get into the prompts of one model."""

    mark: str  # what the chat template writes for an image
    token: str  # the image token, which the tower's outputs replace
    processor: str  # the class that makes pixel values
    settings: Mapping[str, Any]  # of this class, from the checkpoint
    placeholder: Callable[[Outputs], Placeholder]
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of each call
    is_foreign: bool = False  # transformers' own processor says what stands for an image: `foreign.py`
    other_tokens: tuple[str, ...] = ()  # that the outputs of a foreign tower replace, too
    writes_no_places: bool = False  # whether that processor leaves it to clients to write placeholders
    needs_torchvision: bool = False  # whether that processor does
    has_grid: bool = False  # whether a foreign tower's positions follow an image's rows and columns

    @property
    def lacks(self) -> str:
        """Why it cannot read images here; a clause, empty if it can."""
        if self.writes_no_places:
            return "its processor writes no places for images into prompts"
        if self.needs_torchvision and find_spec("torchvision") is None:
            return "its image processor needs the Python package torchvision, which is not installed"
        return ""


def _qwen(said: ProcessorFiles) -> ImageFamily:
    token = said.token("image_token", "<|image_pad|>")
    merged = int(said.image.get("merge_size", 2)) ** 2

    def placeholder(outputs: Outputs) -> Placeholder:
        grid = tuple(int(size) for size in outputs["image_grid_thw"][0])
        return Placeholder(token, (math.prod(grid) // merged,), grid)

    return ImageFamily(token, token, said.image_class("Qwen2VLImageProcessor"), said.image, placeholder)


def _llava(said: ProcessorFiles) -> ImageFamily:
    token, patch = said.token("image_token", "<image>"), said.patch_size()
    num_more = said.num_more_tokens() - said.leaves_out_class()

    def placeholder(outputs: Outputs) -> Placeholder:
        height, width = outputs["pixel_values"].shape[-2:]
        return Placeholder(token, ((height // patch) * (width // patch) + num_more,), (height, width))

    return ImageFamily(token, token, said.image_class("CLIPImageProcessor"), said.image, placeholder)


def _llava_next(said: ProcessorFiles) -> ImageFamily:
    token, patch = said.token("image_token", "<image>"), said.patch_size()
    num_more = said.num_more_tokens() - said.leaves_out_class()
    resolutions = said.resolutions()

    def placeholder(outputs: Outputs) -> Placeholder:
        height, width = (int(size) for size in outputs["image_sizes"][0])
        tile = outputs["pixel_values"].shape[-1]
        side = tile // patch
        views = WholeThenTiles(tile, side, resolutions)
        return Placeholder(token, (views.num_embeddings((height, width), side**2 + num_more),), (height, width))

    return ImageFamily(
        token, token, said.image_class("LlavaNextImageProcessor"), said.image, placeholder, {"do_pad": True}
    )


def _gemma3(said: ProcessorFiles) -> ImageFamily:
    begin, token = said.token("boi_token", "<start_of_image>"), said.token("image_token", "<image_soft_token>")
    end = said.token("eoi_token", "<end_of_image>")
    length = said.tokens_of_gemma()
    whole = f"\n\n{begin}{token}{end}\n\n"

    def placeholder(outputs: Outputs) -> Placeholder:
        num_crops = int(outputs["num_crops"][0])
        text = whole
        if num_crops:
            text = f"Here is the original image {whole} and here are some crops to help you see better "
            text += " ".join([whole] * num_crops)
        return Placeholder(text, (length,) * (1 + num_crops), (num_crops,))

    arguments = {
        "do_convert_rgb": True,
        "do_pan_and_scan": False,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    return ImageFamily(begin, token, said.image_class("Gemma3ImageProcessor"), said.image, placeholder, arguments)


def _idefics3(said: ProcessorFiles) -> ImageFamily:
    token, length = said.token("image_token", "<image>"), said.tokens_of_tile()
    fake = said.token("fake_image_token", "<fake_token_around_image>")
    overview = said.token("global_image_token", "<global-img>")

    def placeholder(outputs: Outputs) -> Placeholder:
        rows, columns = int(outputs["rows"].flat[0]), int(outputs["cols"].flat[0])
        text = ""
        for row in range(1, 1 + rows):
            text += "".join(f"{fake}<row_{row}_col_{column}>{token}" for column in range(1, 1 + columns)) + "\n"
        text += "\n" * bool(rows) + f"{fake}{overview}{token}{fake}"
        return Placeholder(text, (length,) * (1 + rows * columns), (rows, columns))

    arguments = {"return_row_col_info": True}
    return ImageFamily(token, token, said.image_class("Idefics3ImageProcessor"), said.image, placeholder, arguments)


def _pixtral(said: ProcessorFiles) -> ImageFamily:
    token, new_row = said.token("image_token", "[IMG]"), said.token("image_break_token", "[IMG_BREAK]")
    end = said.token("image_end_token", "[IMG_END]")
    patch = said.patch_size() * said.merged_patches()

    def placeholder(outputs: Outputs) -> Placeholder:
        height, width = (int(size) for size in outputs["image_sizes"][0])
        rows, columns = height // patch, width // patch
        return Placeholder(new_row.join([token] * rows) + end, (columns,) * rows, (height, width))

    return ImageFamily(
        token, token, said.image_class("PixtralImageProcessor"), said.image, placeholder, {"patch_size": patch}
    )


_WITHOUT_PLACES = ("PPChart2TableProcessor",)


def _foreign(said: ProcessorFiles, checkpoint: Checkpoint, known: Foreign) -> ImageFamily | None:
    """A model whose processor is `transformers`' own; None if it has no image processor, or no image token."""
    config = JsonFields("config.json", said.config)
    ids = (image_token_of(known, config), *other_tokens_of(known, config))
    token, *others = token_texts(checkpoint.tokenizer(), ids)
    if token is None or not said.image:
        return None
    return ImageFamily(
        known.mark or token,
        token,
        "",
        said.image,
        _nothing,
        is_foreign=True,
        other_tokens=tuple(text for text in others if text is not None),
        writes_no_places=said.processor.get("processor_class") in _WITHOUT_PLACES,
        needs_torchvision=known.needs_torchvision,
        has_grid=known.merge is not None,
    )


def _sees_by_transformers(said: ProcessorFiles) -> bool:
    """Whether the model's own tower does not fit its text part."""
    config = parse_model_config(said.config)
    return isinstance(config, Decoder) and isinstance(config.vision, ForeignVision)


def _nothing(outputs: Outputs) -> Placeholder:
    raise NotImplementedError  # `ForeignProcessor` makes placeholders


_FAMILIES: Mapping[str, Callable[[ProcessorFiles], ImageFamily]] = {
    "Gemma3Processor": _gemma3,
    "Idefics3Processor": _idefics3,
    "LlavaNextProcessor": _llava_next,
    "LlavaProcessor": _llava,
    "PixtralProcessor": _pixtral,
    "Qwen2VLProcessor": _qwen,
    "Qwen2_5_VLProcessor": _qwen,
    "Qwen3VLProcessor": _qwen,
    "SmolVLMProcessor": _idefics3,
}
_PROCESSORS = {
    "Gemma3ForConditionalGeneration": "Gemma3Processor",
    "Idefics3ForConditionalGeneration": "Idefics3Processor",
    "LlavaForConditionalGeneration": "LlavaProcessor",
    "LlavaNextForConditionalGeneration": "LlavaNextProcessor",
    "Mistral3ForConditionalGeneration": "PixtralProcessor",
    "Qwen2VLForConditionalGeneration": "Qwen2VLProcessor",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLProcessor",
    "Qwen3_5ForConditionalGeneration": "Qwen3VLProcessor",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3VLProcessor",
    "Qwen3VLForConditionalGeneration": "Qwen3VLProcessor",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLProcessor",
    "SmolVLMForConditionalGeneration": "SmolVLMProcessor",
}


def _processor_class(said: ProcessorFiles) -> str:
    """The processor's class, as the checkpoint names it or by its architecture; empty: none that we know."""
    architecture = next(iter(said.config.get("architectures") or []), "")
    usual = _PROCESSORS.get(architecture, "")
    if usual == "LlavaProcessor" and said.vision.get("model_type") == "pixtral":
        usual = "PixtralProcessor"
    named = said.processor.get("processor_class") or said.tokens.get("processor_class")
    return named if usual and isinstance(named, str) and named in _FAMILIES else usual


def image_family_of(checkpoint: Checkpoint) -> ImageFamily | None:
    """How images get into the prompts of a checkpoint's model; None: it takes no images, or in no way that we know.

    Raises:
        ConfigError: a setting of the processor makes no sense.
    """
    said = ProcessorFiles(checkpoint)
    architecture = seeing_architecture(said.config) or ""
    if architecture in FOREIGN and (architecture not in TOWERS or _sees_by_transformers(said)):
        return _foreign(said, checkpoint, FOREIGN[architecture])
    make = _FAMILIES.get(_processor_class(said))
    return None if make is None or not said.image else make(said)
