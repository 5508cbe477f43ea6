"""The checkpoint's image processor: transformers' own code over Pillow and numpy, without torch.

Only the process of `read.py` loads this. transformers' processors have a variant that needs neither torch nor
torchvision. It is used even if they are installed, so that results do not depend on what is installed.
"""

import hashlib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from penstock.config import ConfigError
from penstock.models.files.source import Checkpoint
from penstock.parts.images.child.decode import ImageRefusedError
from penstock.parts.images.families import ImageFamily, Placeholder

if TYPE_CHECKING:
    from penstock.parts.images.child.foreign import ForeignProcessor

_MODULES = {
    "CLIPImageProcessor": "clip",
    "Gemma3ImageProcessor": "gemma3",
    "Idefics3ImageProcessor": "idefics3",
    "LlavaImageProcessor": "llava",
    "LlavaNextImageProcessor": "llava_next",
    "PixtralImageProcessor": "pixtral",
    "Qwen2VLImageProcessor": "qwen2_vl",
    "SiglipImageProcessor": "siglip",
    "SmolVLMImageProcessor": "smolvlm",
}


FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What transformers' code raises when an image, or a setting in the checkpoint's files, does not suit it."""


class ProcessedImage(NamedTuple):
    """An image in the form that the engine gets."""

    key: bytes  # 32 bytes: equal for images with equal inputs to the tower
    placeholder: Placeholder
    tensors: dict[str, np.ndarray]  # the tower's inputs


class ImageProcessor:
    """Computes the pixel values of images, one at a time."""

    def __init__(self, family: ImageFamily) -> None:
        """Load transformers' class.

        Raises:
            ConfigError: the checkpoint's class is unknown, or does not accept the checkpoint's settings.
        """
        self._family = family
        name = family.processor
        if name not in _MODULES:
            raise ConfigError(f"preprocessor_config.json: {name[:64]!r} is not supported; {', '.join(_MODULES)} are")
        module = importlib.import_module(f"transformers.models.{_MODULES[name]}.image_processing_pil_{_MODULES[name]}")
        try:
            self._process = getattr(module, f"{name}Pil").from_dict(dict(family.settings))
        except FAILURES as error:
            raise ConfigError(f"preprocessor_config.json: {name} does not take it: {error}") from None
        self._is_nested = _MODULES[name] in ("idefics3", "smolvlm")  # it takes a list of images for each text

    def process(self, image: Image.Image) -> ProcessedImage:
        """An image's pixel values and placeholder.

        Raises:
            ImageRefusedError: the processor does not take an image of this shape.
        """
        try:
            outputs = self._process([[image]] if self._is_nested else [image], **self._family.arguments)
            arrays = {name: np.asarray(value) for name, value in outputs.items()}
            placeholder = self._family.placeholder(arrays)
        except FAILURES as error:
            raise refused(image, error) from None
        if not all(count > 0 for count in placeholder.runs):
            raise ImageRefusedError("it is too small: the model would see nothing of it")
        tensors = {"pixel_values": plain(arrays["pixel_values"])}
        return ProcessedImage(key_of(tensors, placeholder.grid), placeholder, tensors)


def refused(image: Image.Image, error: Exception) -> ImageRefusedError:
    """What to tell when transformers' code has failed on an image."""
    width, height = image.size
    said = str(error).partition("\n")[0][:160]
    return ImageRefusedError(f"the model takes no image of {width} x {height} pixels: {said}")


def processor_of(family: ImageFamily, checkpoint: Checkpoint) -> "ImageProcessor | ForeignProcessor":
    """What makes pixel values and placeholders for a checkpoint's model.

    Raises:
        ConfigError: nothing that is installed does.
    """
    if not family.is_foreign:
        return ImageProcessor(family)
    from penstock.parts.images.child.foreign import ForeignProcessor

    return ForeignProcessor(checkpoint, family)


def plain(values: np.ndarray) -> np.ndarray:
    """The values as they are sent: contiguous, floating-point ones as fp32, others as they are."""
    return np.ascontiguousarray(values, np.float32 if values.dtype.kind == "f" else values.dtype)


def key_of(tensors: Mapping[str, np.ndarray], grid: tuple[int, ...]) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    told: list[Any] = [grid, [(name, str(values.dtype), values.shape) for name, values in tensors.items()]]
    digest.update(repr(told).encode())
    for values in tensors.values():
        digest.update(values.data)
    return digest.digest()
