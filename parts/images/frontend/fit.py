"""Checks that a checkpoint's image processor produces what its vision tower takes, as far as the files tell.

If they do not fit, every request with an image would fail.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from penstock.config import ConfigError
from penstock.models.files.source import Checkpoint
from penstock.models.vision.foreign import ForeignVision
from penstock.models.vision.grid import GridVision
from penstock.models.vision.kinds import Vision
from penstock.models.vision.patches import PatchVision
from penstock.models.vision.tiles import TilePool, TileSquares, TileVision
from penstock.models.vision.views import TilesThenWhole, WholeThenTiles
from penstock.parts.images.families import ImageFamily
from penstock.parts.images.processor_files import ProcessorFiles

_PROCESSOR_FILE = "processor_config.json"
_WITHOUT_CROPS = ("Gemma3ImageProcessor", "SiglipImageProcessor")


class _Pair(NamedTuple):
    """A value in a file, and the value that the tower needs."""

    file: str
    field: str
    said: Any
    needed: Any


def check_fit(checkpoint: Checkpoint, family: ImageFamily, image_token_id: int, vision: Vision) -> None:
    """Compare processor and tower. `image_token_id`: the tokenizer's id of the family's image token.

    Raises:
        ConfigError: they do not fit; the message names the file and the field.
    """
    if image_token_id != vision.image_token:
        raise ConfigError(
            f"tokenizer.json: the image token {family.token!r} has the id {image_token_id}, but in config.json it is "
            f"{vision.image_token}: take both files from the same model, or serve texts alone (--max-images 0)"
        )
    said = ProcessorFiles(checkpoint)
    match vision:
        case GridVision():
            pairs = _of_grid(said, vision)
        case PatchVision():
            pairs = _of_patches(said, vision)
        case ForeignVision():
            return  # its own processor makes what its own code takes
        case TileVision():
            pairs = _of_tiles(said, family.processor, vision)
    for file, field, value, needed in pairs:
        if value != needed:
            raise ConfigError(
                f"{file}: {field} is {_shown(value)}, but by config.json the vision tower needs {_shown(needed)}: take "
                "both files from the same model, or serve texts alone (--max-images 0)"
            )


def _shown(value: Any) -> str:
    return str(value)[:200]


def _of_grid(said: ProcessorFiles, vision: GridVision) -> Iterator[_Pair]:
    _, frames, size, _ = vision.patch_shape
    of_tower = {"patch_size": (14, size), "temporal_patch_size": (2, frames), "merge_size": (2, vision.merge)}
    for name, (usual, needed) in of_tower.items():
        yield _Pair(said.image_file, name, said.image.get(name, usual), needed)


def _of_patches(said: ProcessorFiles, vision: PatchVision) -> Iterator[_Pair]:
    merged = said.merged_patches()
    name = "patch_size" if merged == 1 else "patch_size * spatial_merge_size"
    yield _Pair(_PROCESSOR_FILE, name, said.patch_size() * merged, vision.side)


def _of_tiles(said: ProcessorFiles, image_class: str, vision: TileVision) -> Iterator[_Pair]:
    name, size = _size_of_pictures(said.image, image_class, vision)
    if size is not None:
        yield _Pair(said.image_file, name, size, [vision.tile, vision.tile])
    made = vision.made
    if isinstance(made, TilePool):
        yield _Pair(_PROCESSOR_FILE, "image_seq_length", said.tokens_of_gemma(), made.side**2)
    elif isinstance(made, TileSquares):
        yield _Pair(_PROCESSOR_FILE, "image_seq_len", said.tokens_of_tile(), made.num_embeddings(vision.num_patches))
    else:
        yield from _of_plain_tiles(said, vision)


def _of_plain_tiles(said: ProcessorFiles, vision: TileVision) -> Iterator[_Pair]:
    """Checks for tiles of which each patch becomes an embedding."""
    patch = said.patch_size()
    if not patch or vision.tile // patch != vision.tile // vision.patch:
        yield _Pair(_PROCESSOR_FILE, "patch_size", patch, vision.patch)
    num_more, is_left = said.num_more_tokens(), said.leaves_out_class()
    if num_more - is_left != vision.has_class - vision.drops_first:
        if is_left != vision.drops_first:
            strategies = ["default" if leaves else "full" for leaves in (is_left, vision.drops_first)]
            yield _Pair(_PROCESSOR_FILE, "vision_feature_select_strategy", *strategies)
        yield _Pair(_PROCESSOR_FILE, "num_additional_image_tokens", num_more, int(vision.has_class))
    if isinstance(vision.views, WholeThenTiles):
        yield _Pair(said.image_file, "image_grid_pinpoints", said.resolutions(), vision.views.resolutions)


def _size_of_pictures(image: Mapping[str, Any], image_class: str, vision: TileVision) -> tuple[str, list[Any] | None]:
    """The field with the size of all processed pictures, and that size ([height, width]); None if sizes differ."""
    if isinstance(vision.views, TilesThenWhole):
        longest = image.get("max_image_size") or {"longest_edge": 364}
        if isinstance(longest, Mapping):
            longest = longest.get("longest_edge")
        return "max_image_size", [longest, longest]
    is_cropped = image.get("do_center_crop", True) and image_class not in _WITHOUT_CROPS
    name = "crop_size" if is_cropped else "size"
    size = image.get(name) or {"height": 224, "width": 224}
    if isinstance(size, Mapping):
        return name, [size["height"], size["width"]] if {"height", "width"} <= set(size) else None
    return name, size if isinstance(size, list) else [size, size]
