"""The checkpoint's image processor: transformers' own code over Pillow and numpy, without torch.

Only the process of `read.py` loads this. transformers' processors have a variant that needs neither torch nor
torchvision. It is used even if they are installed, so that results do not depend on what is installed.
"""

import hashlib
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from penstock.config import ConfigError
from penstock.parts.images.child.decode import ImageRefusedError
from penstock.parts.images.families import ImageFamily, Placeholder

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
        except (TypeError, ValueError, KeyError, AttributeError) as error:
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
        except (ValueError, ZeroDivisionError, IndexError, OverflowError) as error:
            width, height = image.size
            said = str(error).partition("\n")[0][:160]
            raise ImageRefusedError(f"the model takes no image of {width} x {height} pixels: {said}") from None
        if not all(count > 0 for count in placeholder.runs):
            raise ImageRefusedError("it is too small: the model would see nothing of it")
        tensors = {"pixel_values": _plain(arrays["pixel_values"])}
        return ProcessedImage(_key(tensors, placeholder.grid), placeholder, tensors)


def _plain(values: np.ndarray) -> np.ndarray:
    """The values as they are sent: contiguous, floating-point ones as fp32, others as they are."""
    return np.ascontiguousarray(values, np.float32 if values.dtype.kind == "f" else values.dtype)


def _key(tensors: Mapping[str, np.ndarray], grid: tuple[int, ...]) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    told: list[Any] = [grid, [(name, str(values.dtype), values.shape) for name, values in tensors.items()]]
    digest.update(repr(told).encode())
    for values in tensors.values():
        digest.update(values.data)
    return digest.digest()
