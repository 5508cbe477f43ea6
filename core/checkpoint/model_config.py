"""What the engine must know of any model, whatever its family; the families' own descriptions extend it."""

import msgspec

from penstock.core.config.options import ConfigError


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What config.json says, as far as it concerns more than the model's own code."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # of each layer's attention
    max_model_len: int  # what positions allow
    checkpoint_dtype: str  # torch's name, as "bfloat16"

    @property
    def has_page_groups(self) -> bool:
        """Whether the model's code reads a page table for each group of layers that keep equally many positions."""
        return False

    @property
    def num_step_weights(self) -> int:
        """Weights of the matrices that a decode step reads: all but an embedding of its own."""
        return 0


def quantized(method: str) -> ConfigError:
    """What to say of weights in a format that is not there."""
    return ConfigError(
        f"this checkpoint is quantized ({method[:64]}), and quantized weights are not supported yet: "
        "serve the one that it was made from, in bfloat16, float16 or float32"
    )
