"""What all descriptions of vision towers have: these make vectors for the decoder's residual stream of a picture's
patches.

The towers that compute them are in `gpu_worker/models/vision/`.
"""

from typing import Literal, Protocol

import msgspec

from penstock.core.checkpoint.parsing.family import Shape

TOWER_PREFIX = "vision_tower."
PROJECTOR_PREFIX = "multi_modal_projector."
VisionActivation = Literal["silu", "quick_gelu", "gelu", "gelu_tanh"]


class PatchMLP(msgspec.Struct, frozen=True, kw_only=True):
    """Two matrices make an embedding of each patch (LLaVA)."""

    activation: VisionActivation
    has_bias: bool

    def num_embeddings(self, num_patches: int) -> int:
        """Of a tile with so many patches."""
        return num_patches


class VisionTower(Protocol):
    """What all descriptions of towers tell."""

    @property
    def image_token(self) -> int:
        """Its positions in a prompt get the embeddings."""

    @property
    def width(self) -> int:
        """Numbers of an embedding, with those for the decoder's layers."""

    @property
    def tensors(self) -> dict[str, Shape]:
        """Every tensor that is needed, with its shape."""

    def name_of(self, name: str) -> str | None:
        """Our name of a checkpoint's tensor; None if it is not of the tower, or not needed."""

    @property
    def is_whole(self) -> bool:
        """Whether the positions of a picture see each other in the decoder, those behind them, too."""

    @property
    def small_grid(self) -> tuple[int, ...]:
        """Of a picture that has as few patches as one can have."""

    def num_embeddings(self, grid: tuple[int, ...]) -> int:
        """Of a picture, by its grid as the processor tells it; 0 if there is no such picture."""

    def pixel_shape(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Of its pixel values."""


def linear(name: str, num_outputs: int, num_inputs: int) -> dict[str, Shape]:
    """A matrix with a bias."""
    return {f"{name}.weight": (num_outputs, num_inputs), f"{name}.bias": (num_outputs,)}


def mlp_tensors(made: PatchMLP, num_inputs: int, num_outputs: int) -> dict[str, Shape]:
    """Those of both matrices."""
    found = linear("linear_1", num_outputs, num_inputs) | linear("linear_2", num_outputs, num_outputs)
    return {name: shape for name, shape in found.items() if made.has_bias or not name.endswith(".bias")}
