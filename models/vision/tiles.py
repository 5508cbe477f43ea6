"""The description of a vision tower for images or tiles of one size: CLIP or SigLIP, and the projector after it.

patches + positions → layers (attention and an MLP, each after a norm) → some layers' outputs → embeddings
"""

import msgspec

from penstock.models.parsing.family import Shape
from penstock.models.vision.tower import (
    PROJECTOR_PREFIX,
    TOWER_PREFIX,
    PatchMLP,
    VisionActivation,
    linear,
    mlp_tensors,
)
from penstock.models.vision.views import TileViews, WholeThenTiles

POOL_MATRIX = f"{PROJECTOR_PREFIX}mm_input_projection_weight"
POOL_NORM = f"{PROJECTOR_PREFIX}mm_soft_emb_norm"
SQUARES_MATRIX = "connector.modality_projection.proj"
NEWLINE = "image_newline"
_PREFIXES = (f"{TOWER_PREFIX}vision_model.", TOWER_PREFIX, "vision_model.")
_BEHIND = (PROJECTOR_PREFIX, "connector.", NEWLINE)


class TileSquares(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix turns each square of patches, concatenated, into an embedding (Idefics3)."""

    square: int  # patches on its side

    def num_embeddings(self, num_patches: int) -> int:
        """As in `PatchMLP`."""
        return num_patches // self.square**2


class TilePool(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of each square of patches, then a norm and a matrix, give an embedding (Gemma 3)."""

    side: int  # side of the square of embeddings

    def num_embeddings(self, num_patches: int) -> int:
        """As in `PatchMLP`."""
        return self.side**2


class TileVision(msgspec.Struct, frozen=True, kw_only=True):
    """A tower for tiles."""

    image_token: int  # its positions in a prompt get the embeddings
    tile: int  # pixels on a side of a tile
    patch: int  # pixels on a side of a patch
    num_channels: int
    hidden_size: int
    num_layers: int  # needed layers
    num_heads: int
    mlp_size: int
    activation: VisionActivation
    norm_eps: float
    has_class: bool  # a learned vector before the patches, and a norm of all before the layers; patches have no bias
    drops_first: bool  # whether to drop the first output, which is that vector's
    features: tuple[int, ...]  # after how many layers their outputs are taken, side by side
    out_size: int
    has_last_norm: bool = False  # after the last layer
    made: PatchMLP | TilePool | TileSquares
    views: TileViews
    shares_positions: bool = False
    """A patch gets the learned vector at its relative place in the tile, which rounding may shift (Idefics3)."""
    is_whole: bool = False
    """As in `VisionTower`."""

    @property
    def is_whole_in_windows(self) -> bool:
        """As in `VisionTower`."""
        return False

    @property
    def width(self) -> int:
        """As in `VisionTower`."""
        return self.out_size

    @property
    def num_patches(self) -> int:
        """Patches of a tile."""
        return (self.tile // self.patch) ** 2

    @property
    def small_grid(self) -> tuple[int, ...]:
        """As in `VisionTower`."""
        return self.views.small_grid

    def num_embeddings(self, grid: tuple[int, ...]) -> int:
        """As in `VisionTower`."""
        return self.views.num_embeddings(grid, self.made.num_embeddings(self.num_patches + self._num_more))

    @property
    def _num_more(self) -> int:
        """Additional outputs of a tile beside those of its patches."""
        return self.has_class - self.drops_first

    def pixel_shape(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """As in `VisionTower`."""
        return *self.views.pictures, self.views.num_tiles(grid), self.num_channels, self.tile, self.tile

    @property
    def tensors(self) -> dict[str, Shape]:
        """As in `VisionTower`."""
        return {TOWER_PREFIX + name: shape for name, shape in _tensors(self).items()} | _made(self)

    def name_of(self, name: str) -> str | None:
        """As in `VisionTower`."""
        bare = name.removeprefix("model.")
        if (prefix := next(filter(bare.startswith, _PREFIXES), None)) is not None:
            its = bare.removeprefix(prefix)
            return None if _is_left(its, self) else TOWER_PREFIX + its
        return bare if bare.startswith(_BEHIND) else None


def _is_left(name: str, vision: TileVision) -> bool:
    """Return whether a tensor comes after the last used output, or is no weight."""
    if name.startswith("encoder.layers."):
        number = name.removeprefix("encoder.layers.").partition(".")[0]
        return number.isdecimal() and int(number) >= vision.num_layers
    if name.startswith("post_layernorm."):
        return not vision.has_last_norm
    return name == "embeddings.position_ids" or name.startswith("head.")


def _tensors(vision: TileVision) -> dict[str, Shape]:
    hidden, size, patch = vision.hidden_size, vision.mlp_size, vision.patch
    found: dict[str, Shape] = {
        "embeddings.patch_embedding.weight": (hidden, vision.num_channels, patch, patch),
        "embeddings.position_embedding.weight": (vision.num_patches + vision.has_class, hidden),
    }
    if vision.has_class:
        found |= {"embeddings.class_embedding": (hidden,)} | _norm("pre_layrnorm", hidden)
    else:
        found["embeddings.patch_embedding.bias"] = (hidden,)
    for i in range(vision.num_layers):
        layer = f"encoder.layers.{i}."
        found |= _norm(f"{layer}layer_norm1", hidden) | _norm(f"{layer}layer_norm2", hidden)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= linear(f"{layer}self_attn.{name}", hidden, hidden)
        found |= linear(f"{layer}mlp.fc1", size, hidden) | linear(f"{layer}mlp.fc2", hidden, size)
    if vision.has_last_norm:
        found |= _norm("post_layernorm", hidden)
    return found


def _made(vision: TileVision) -> dict[str, Shape]:
    made = vision.made
    if isinstance(made, TilePool):
        return {POOL_MATRIX: (vision.hidden_size, vision.out_size), f"{POOL_NORM}.weight": (vision.hidden_size,)}
    if isinstance(made, TileSquares):
        return {f"{SQUARES_MATRIX}.weight": (vision.out_size, vision.hidden_size * made.square**2)}
    found = mlp_tensors(made, vision.hidden_size * len(vision.features), vision.out_size)
    found = {PROJECTOR_PREFIX + name: shape for name, shape in found.items()}
    return found | {NEWLINE: (vision.out_size,)} if isinstance(vision.views, WholeThenTiles) else found


def _norm(name: str, size: int) -> dict[str, Shape]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
