"""The interface of vision towers' descriptions. A tower turns an image's patches into vectors for the decoder.

The towers that compute them are in `gpu_worker/models/vision/`.
"""

from typing import Literal, Protocol

import msgspec

from penstock.models.parsing.family import Shape

TOWER_PREFIX = "vision_tower."
PROJECTOR_PREFIX = "multi_modal_projector."
VisionActivation = Literal["silu", "quick_gelu", "gelu", "gelu_tanh"]


class PatchMLP(msgspec.Struct, frozen=True, kw_only=True):
    """Two matrices turn each patch into an embedding (LLaVA)."""

    activation: VisionActivation
    has_bias: bool

    def num_embeddings(self, num_patches: int) -> int:
        """Return the embeddings of a tile with this many patches."""
        return num_patches


class VisionTower(Protocol):
    """The members of all towers' descriptions."""

    @property
    def image_token(self) -> int:
        """The token whose positions in a prompt get the embeddings."""

    @property
    def width(self) -> int:
        """Size of an embedding, including the parts for the decoder's layers."""

    @property
    def tensors(self) -> dict[str, Shape]:
        """Every needed tensor, with its shape."""

    def name_of(self, name: str) -> str | None:
        """Return our name of a checkpoint's tensor; None if it is not part of the tower, or not needed."""

    @property
    def is_whole(self) -> bool:
        """Whether the positions of an image attend to each other in the decoder in both directions."""

    @property
    def is_whole_in_windows(self) -> bool:
        """Whether they do so only in layers with a window."""

    @property
    def small_grid(self) -> tuple[int, ...]:
        """The grid of an image with the fewest possible patches."""

    def num_embeddings(self, grid: tuple[int, ...]) -> int:
        """Return the embeddings of an image, by its grid from the processor; 0 if the grid is invalid."""

    def pixel_shape(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an image's pixel values."""


def linear(name: str, num_outputs: int, num_inputs: int) -> dict[str, Shape]:
    """Return the tensors of a matrix with a bias."""
    return {f"{name}.weight": (num_outputs, num_inputs), f"{name}.bias": (num_outputs,)}


def mlp_tensors(made: PatchMLP, num_inputs: int, num_outputs: int) -> dict[str, Shape]:
    """Return the tensors of both matrices."""
    found = linear("linear_1", num_outputs, num_inputs) | linear("linear_2", num_outputs, num_outputs)
    return {name: shape for name, shape in found.items() if made.has_bias or not name.endswith(".bias")}
