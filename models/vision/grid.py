"""The description of a Qwen-VL vision tower.

patches → layers (attention and an MLP, each after a norm) → norm → neighbours merged → embeddings
"""

from typing import Literal

import msgspec

from penstock.models.parsing.family import Shape
from penstock.models.vision.tower import VisionActivation, linear

GRID_PREFIX = "visual."
"""The beginning of our names of its weights, whatever the checkpoint puts before it."""


class VisionNames(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint's names of parts that differ between models."""

    mlp: tuple[str, ...]  # the last one is down; of two before it, the first is a gate
    merger: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")  # a norm, and the two matrices after it


class GridVision(msgspec.Struct, frozen=True, kw_only=True):
    """Patches of any grid, whose rows and columns rotate queries and keys."""

    image_token: int  # its positions in a prompt get the embeddings
    patch_shape: tuple[int, ...]  # of a patch's numbers: channels, frames, rows, columns
    patch_bias: bool = False
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    activation: VisionActivation
    norm: Literal["rms", "layer"]
    norm_eps: float = 1e-6
    theta: float = 10000.0  # of the rotation
    merge: int  # patches on a side of the square that becomes one embedding
    out_size: int
    window: int = 0  # embeddings on a side of the windows of attention; 0: no windows
    whole_layers: tuple[int, ...] = ()  # layers without these windows
    positions: int = 0  # rows and columns of learned vectors, which are resized to the image; 0: none
    deep_layers: tuple[int, ...] = ()
    """The outputs of these layers are merged, too, and added after the first layers of the decoder, one after each."""
    names: VisionNames

    @property
    def width(self) -> int:
        """Size of an embedding, including the parts for the decoder's layers."""
        return self.out_size * (1 + len(self.deep_layers))

    @property
    def num_inputs(self) -> int:
        """Size of a patch."""
        count = 1
        for size in self.patch_shape:
            count *= size
        return count

    @property
    def small_grid(self) -> tuple[int, ...]:
        """As in `VisionTower`."""
        return 1, self.merge, self.merge

    def num_embeddings(self, grid: tuple[int, ...]) -> int:
        """Return the embeddings of an image with a grid of frames, rows and columns of patches; 0 if it is invalid."""
        if len(grid) != 3 or min(grid) < 1 or grid[1] % self.merge or grid[2] % self.merge:
            return 0
        return grid[0] * grid[1] * grid[2] // self.merge**2

    @property
    def is_whole(self) -> bool:
        """As in `VisionTower`."""
        return False

    @property
    def is_whole_in_windows(self) -> bool:
        """As in `VisionTower`."""
        return False

    def pixel_shape(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the pixel values."""
        return self.num_embeddings(grid) * self.merge**2, self.num_inputs

    @property
    def tensors(self) -> dict[str, Shape]:
        """Every tensor of the tower, with its shape."""
        return _tensors(self)

    def name_of(self, name: str) -> str | None:
        """Return our name of a checkpoint's tensor; None if it is not part of the tower, or not needed."""
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
