"""The description of a tower of Qwen-VL's kind.

patches → layers (attention and an MLP, each after a norm) → norm → neighbours merged → embeddings
"""

from typing import Literal

import msgspec

from penstock.core.checkpoint.parsing.family import Shape
from penstock.core.checkpoint.vision.tower import VisionActivation, linear

GRID_PREFIX = "visual."
"""What names of its weights begin with, whatever the checkpoint has before that."""


class VisionNames(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint calls the parts whose names differ."""

    mlp: tuple[str, ...]  # the last one leads back; before it two: the first is a gate
    merger: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")  # a norm, and the matrices after it


class GridVision(msgspec.Struct, frozen=True, kw_only=True):
    """Patches of any grid, whose rows and columns rotate queries and keys."""

    image_token: int  # its positions in a prompt get the embeddings
    patch_shape: tuple[int, ...]  # of the numbers of a patch: channels, frames, rows, columns
    patch_bias: bool = False
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    activation: VisionActivation
    norm: Literal["rms", "layer"]
    norm_eps: float = 1e-6
    theta: float = 10000.0  # of the rotation
    merge: int  # squares of so many by so many patches become one embedding
    out_size: int
    window: int = 0  # embeddings on a side of the squares that see only themselves; 0: all see all
    whole_layers: tuple[int, ...] = ()  # layers without these windows
    positions: int = 0  # rows and columns of learned vectors, which are stretched to the picture's; 0: none
    deep_layers: tuple[int, ...] = ()
    """What these layers make is merged, too, and added behind the first layers of the decoder, one behind each."""
    names: VisionNames

    @property
    def width(self) -> int:
        """Numbers of an embedding, with those for the decoder's layers."""
        return self.out_size * (1 + len(self.deep_layers))

    @property
    def num_inputs(self) -> int:
        """Numbers of a patch."""
        count = 1
        for size in self.patch_shape:
            count *= size
        return count

    @property
    def small_grid(self) -> tuple[int, ...]:
        """As in `VisionTower`."""
        return 1, self.merge, self.merge

    def num_embeddings(self, grid: tuple[int, ...]) -> int:
        """Of a picture with so many frames, rows and columns of patches; 0 if there is no such picture."""
        if len(grid) != 3 or min(grid) < 1 or grid[1] % self.merge or grid[2] % self.merge:
            return 0
        return grid[0] * grid[1] * grid[2] // self.merge**2

    @property
    def is_whole(self) -> bool:
        """As in `VisionTower`."""
        return False

    def pixel_shape(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Of its pixel values."""
        return self.num_embeddings(grid) * self.merge**2, self.num_inputs

    @property
    def tensors(self) -> dict[str, Shape]:
        """Every tensor of it, with its shape."""
        return _tensors(self)

    def name_of(self, name: str) -> str | None:
        """Our name of a checkpoint's tensor; None if it is not of the tower, or not needed."""
        bare = name.removeprefix("model.")
        return bare if bare.startswith(GRID_PREFIX) else None


def _tensors(vision: GridVision) -> dict[str, Shape]:
    hidden, size, merged = vision.hidden_size, vision.mlp_size, vision.hidden_size * vision.merge**2
    found: dict[str, Shape] = {"patch_embed.proj.weight": (hidden, *vision.patch_shape)}
    if vision.patch_bias:
        found["patch_embed.proj.bias"] = (hidden,)
    for i in range(vision.num_layers):
        layer = f"blocks.{i}."
        found |= _norm(f"{layer}norm1", vision) | _norm(f"{layer}norm2", vision)
        found |= linear(f"{layer}attn.qkv", 3 * hidden, hidden) | linear(f"{layer}attn.proj", hidden, hidden)
        for name in vision.names.mlp[:-1]:
            found |= linear(layer + name, size, hidden)
        found |= linear(layer + vision.names.mlp[-1], hidden, size)
    if vision.positions:
        found |= {"pos_embed.weight": (vision.positions**2, hidden)}
    norm, first, second = vision.names.merger
    mergers = [("merger.", hidden), *((f"deepstack_merger_list.{i}.", merged) for i in range(len(vision.deep_layers)))]
    for merger, normed in mergers:
        found |= _norm(merger + norm, vision, normed)
        found |= linear(merger + first, merged, merged) | linear(merger + second, vision.out_size, merged)
    return {GRID_PREFIX + name: shape for name, shape in found.items()}


def _norm(name: str, vision: GridVision, size: int = 0) -> dict[str, Shape]:
    kinds = ("weight", "bias") if vision.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": (size or vision.hidden_size,) for kind in kinds}
