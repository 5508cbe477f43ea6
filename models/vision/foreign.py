"""The description of a tower that `transformers`' code computes. Only the worker knows what it is made of.

Its table says of each architecture what nobody can see in its config.json.
"""

import msgspec

from penstock.models.parsing.family import Shape


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an architecture whose tower `transformers` computes."""

    image_token: tuple[str, int] = ("image_token_id", -1)  # the field of config.json, and its usual value; -1: none
    other_tokens: tuple[str, tuple[int, ...]] = ("", ())
    """The field of config.json with more tokens that the tower's outputs replace, and their usual ids."""
    mark: str = ""  # what chat templates write for an image, if it is not this token
    needs_torchvision: bool = False  # whether its image processor is made of that library's functions alone
    deep: str = ""  # the field of vision_config with the tower's layers whose outputs go to layers of the decoder
    changes_logits: bool = False
    """Whether the whole model scales or caps its logits as its text part alone would. Most forget to."""
    merge: tuple[str, int] | None = None
    """Where positions have rows and columns: the field of vision_config with the patches on a side of what becomes an
    embedding, and its usual value. None: positions only count."""


class ForeignVision(msgspec.Struct, frozen=True, kw_only=True):
    """A tower of `transformers`. How many embeddings an image has says the processor, and then the tower."""

    architecture: str
    image_token: int  # its positions in a prompt get the embeddings
    out_size: int
    num_deep: int = 0
    """How many parts an embedding has for the decoder's layers: one is added after each of the first layers."""
    scale: float = 1.0
    """Embeddings are multiplied by it, because the decoder of `transformers` multiplies them with those of tokens."""
    merge: int = 0  # as in `Foreign`; 0: positions only count
    is_whole: bool = False  # as in `VisionTower`
    is_whole_in_windows: bool = False  # as in `VisionTower`

    @property
    def width(self) -> int:
        """As in `VisionTower`."""
        return self.out_size * (1 + self.num_deep)

    @property
    def norm_eps(self) -> float:
        """Unused: its code knows."""
        return 0.0

    @property
    def small_grid(self) -> tuple[int, ...]:
        """As in `VisionTower`."""
        return (1, self.merge, self.merge) if self.merge else (1,)

    def num_embeddings(self, grid: tuple[int, ...]) -> int:
        """As in `VisionTower`; without rows and columns the grid is just this number."""
        if not self.merge:
            return grid[0] if len(grid) == 1 else 0
        if len(grid) != 3 or min(grid) < 1 or grid[1] % self.merge or grid[2] % self.merge:
            return 0
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def pixel_shape(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Empty: only its own code knows."""
        return ()

    @property
    def tensors(self) -> dict[str, Shape]:
        """None that the loader must find: `transformers` does."""
        return {}

    def name_of(self, name: str) -> str | None:
        """As in `VisionTower`."""
        return None
