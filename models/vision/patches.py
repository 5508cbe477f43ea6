"""The description of Pixtral's tower.

patches → norm → layers (attention and an MLP, each after a norm) → neighbours merged (Mistral 3) → embeddings
"""

import msgspec

from penstock.models.parsing.family import Shape
from penstock.models.vision.tower import (
    PROJECTOR_PREFIX,
    TOWER_PREFIX,
    PatchMLP,
    VisionActivation,
    mlp_tensors,
)

NORM_EPS = 1e-5  # in the tower, whatever the configuration says


class SquareMerge(msgspec.Struct, frozen=True, kw_only=True):
    """A norm, and a matrix that turns each square of patches into one vector."""

    square: int  # patches on its side
    norm_eps: float


class PatchVision(msgspec.Struct, frozen=True, kw_only=True):
    """Patches of an image of any size, row by row; their rows and columns rotate queries and keys."""

    image_token: int  # its positions in a prompt get the embeddings
    patch: int  # pixels on a side
    num_channels: int
    hidden_size: int
    num_layers: int  # needed layers
    num_heads: int
    mlp_size: int
    activation: VisionActivation
    theta: float  # of the rotation
    features: tuple[int, ...]  # after how many layers their outputs are taken, side by side
    merge: SquareMerge | None
    made: PatchMLP
    out_size: int

    @property
    def width(self) -> int:
        """As in `VisionTower`."""
        return self.out_size

    @property
    def is_whole(self) -> bool:
        """As in `VisionTower`."""
        return False

    @property
    def is_whole_in_windows(self) -> bool:
        """As in `VisionTower`."""
        return False

    @property
    def norm_eps(self) -> float:
        """Epsilon of the tower's norms."""
        return NORM_EPS

    @property
    def side(self) -> int:
        """Pixels on a side of the square that becomes an embedding."""
        return self.patch * (1 if self.merge is None else self.merge.square)

    @property
    def small_grid(self) -> tuple[int, ...]:
        """As in `VisionTower`."""
        return self.side, self.side

    def num_embeddings(self, grid: tuple[int, ...]) -> int:
        """As in `VisionTower`; the grid is the size of the tower's input."""
        side = self.side
        if len(grid) != 2 or min(grid) < 1 or grid[0] % side or grid[1] % side:
            return 0
        return grid[0] // side * (grid[1] // side)

    def pixel_shape(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """As in `VisionTower`."""
        return 1, self.num_channels, *grid

    @property
    def tensors(self) -> dict[str, Shape]:
        """As in `VisionTower`."""
        of_tower = {TOWER_PREFIX + name: shape for name, shape in _tensors(self).items()}
        return of_tower | {PROJECTOR_PREFIX + name: shape for name, shape in _projector(self).items()}

    def name_of(self, name: str) -> str | None:
        """As in `VisionTower`."""
        bare = name.removeprefix("model.")
        number = bare.removeprefix(f"{TOWER_PREFIX}transformer.layers.").partition(".")[0]
        if number.isdecimal() and int(number) >= self.num_layers:
            return None
        return bare if bare.startswith((TOWER_PREFIX, PROJECTOR_PREFIX)) else None


def _tensors(vision: PatchVision) -> dict[str, Shape]:
    hidden, size = vision.hidden_size, vision.mlp_size
    found: dict[str, Shape] = {
        "patch_conv.weight": (hidden, vision.num_channels, vision.patch, vision.patch),
        "ln_pre.weight": (hidden,),
    }
    for i in range(vision.num_layers):
        layer = f"transformer.layers.{i}."
        found |= {f"{layer}attention_norm.weight": (hidden,), f"{layer}ffn_norm.weight": (hidden,)}
        found |= {f"{layer}attention.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        found |= {f"{layer}feed_forward.{part}_proj.weight": (size, hidden) for part in ("gate", "up")}
        found |= {f"{layer}feed_forward.down_proj.weight": (hidden, size)}
    return found


def _projector(vision: PatchVision) -> dict[str, Shape]:
    hidden, merge = vision.hidden_size, vision.merge
    found = mlp_tensors(vision.made, len(vision.features) * hidden, vision.out_size)
    if merge is None:
        return found
    return found | {"norm.weight": (hidden,), "patch_merger.merging_layer.weight": (hidden, merge.square**2 * hidden)}
