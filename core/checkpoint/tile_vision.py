"""The description of a vision tower for pictures of one size, or tiles of it: CLIP, SigLIP, and what leads from there.

patches + positions → layers (attention and an MLP, each after a norm) → some layers' outputs → embeddings
"""

import msgspec

from penstock.core.checkpoint.parsing.family import Shape
from penstock.core.checkpoint.vision import VisionActivation, linear

TOWER_PREFIX = "vision_tower."
POOL_MATRIX = "multi_modal_projector.mm_input_projection_weight"
POOL_NORM = "multi_modal_projector.mm_soft_emb_norm"
NEWLINE = "image_newline"
_INNER_PREFIX = f"{TOWER_PREFIX}vision_model."


class TileMLP(msgspec.Struct, frozen=True, kw_only=True):
    """Two matrices make an embedding of each patch (LLaVA)."""

    activation: VisionActivation
    has_bias: bool


class TilePool(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of each square of patches, a norm and a matrix make an embedding (Gemma 3)."""

    side: int  # of the embeddings, which are a square


class TileVision(msgspec.Struct, frozen=True, kw_only=True):
    """A tower of this kind."""

    image_token: int  # its positions in a prompt get the embeddings
    tile: int  # pixels on a side of what it sees
    patch: int  # the same of a patch
    num_channels: int
    hidden_size: int
    num_layers: int  # that are needed
    num_heads: int
    mlp_size: int
    activation: VisionActivation
    norm_eps: float
    has_class: bool  # a learned vector before the patches, and a norm of all before the layers; patches have no bias
    drops_first: bool  # the first of the layers' outputs, which is that vector's
    features: tuple[int, ...]  # after how many layers their outputs are taken, side by side
    out_size: int
    has_last_norm: bool = False  # of what the last layer makes
    made: TileMLP | TilePool
    is_whole: bool = False
    """As in `VisionTower`."""
    resolutions: tuple[tuple[int, int], ...] = ()
    """Rows and columns of pixels that are cut into tiles behind a small view of all, one for the picture (LLaVA-NeXT):
    their embeddings are put together again without what the picture was padded with, each row with a learned end."""

    @property
    def width(self) -> int:
        """As in `VisionTower`."""
        return self.out_size

    @property
    def num_patches(self) -> int:
        """Of a tile."""
        return (self.tile // self.patch) ** 2

    def num_embeddings(self, grid: tuple[int, ...]) -> int:
        """As in `VisionTower`; the grid is the size of what the tower gets, or with resolutions that of the picture.

        With a pool it is the number of further views, of which none is served.
        """
        if isinstance(self.made, TilePool):
            return self.made.side**2 if grid == (0,) else 0
        if self.resolutions and len(grid) == 2 and min(grid) > 0:
            _, _, rows, columns = self.layout(*grid)
            return rows * (columns + 1) + self.num_patches if rows and columns else 0
        if grid != (self.tile, self.tile):
            return 0
        return self.num_patches + self.has_class - self.drops_first

    def layout(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Rows and columns of tiles for a picture of this size; rows and columns of their embeddings that are kept."""
        best = max(self.resolutions, key=lambda resolution: _merit(height, width, *resolution))
        side = self.tile // self.patch
        of_tiles = (best[0] // self.tile, best[1] // self.tile)
        rows, columns = of_tiles[0] * side, of_tiles[1] * side
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return *of_tiles, rows, columns

    def pixel_shape(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """As in `VisionTower`."""
        shape = (self.num_channels, self.tile, self.tile)
        if not self.resolutions:
            return 1, *shape
        rows, columns, _, _ = self.layout(*grid)
        return 1, 1 + rows * columns, *shape

    @property
    def tensors(self) -> dict[str, Shape]:
        """As in `VisionTower`."""
        return {TOWER_PREFIX + name: shape for name, shape in _tensors(self).items()} | _made(self)

    def name_of(self, name: str) -> str | None:
        """As in `VisionTower`."""
        bare = name.removeprefix("model.")
        if bare.startswith(TOWER_PREFIX):
            bare = TOWER_PREFIX + bare.removeprefix(_INNER_PREFIX).removeprefix(TOWER_PREFIX)
            return None if _is_left(bare.removeprefix(TOWER_PREFIX), self) else bare
        return bare if bare.startswith("multi_modal_projector.") or bare == NEWLINE else None


def _is_left(name: str, vision: TileVision) -> bool:
    """Whether a tensor is of what is behind the last output that is taken, or no weight."""
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
    out, features = vision.out_size, vision.hidden_size * len(vision.features)
    found = linear("multi_modal_projector.linear_1", out, features) | linear("multi_modal_projector.linear_2", out, out)
    found = {name: shape for name, shape in found.items() if made.has_bias or not name.endswith(".bias")}
    return found | {NEWLINE: (out,)} if vision.resolutions else found


def _merit(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Of a resolution for a picture: how many of its pixels it keeps; then, how few of its own it wastes."""
    scale = min(columns / width, rows / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return kept, kept - rows * columns


def _norm(name: str, size: int) -> dict[str, Shape]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
