"""What the engine must know about any model, whatever its family; the families' own configurations extend it."""

from typing import NamedTuple

import msgspec

from penstock.core.checkpoint.formats.format import Quantization
from penstock.core.checkpoint.formats.kv_scales import KVScaleType


class KVShape(NamedTuple):
    """What a layer keeps of each position, and for how long."""

    num_heads: int
    key_dim: int
    value_dim: int  # 0: values are the first part of the keys
    window: int | None  # position p needs those in (p - window, p]; None: all before it


class PromptClasses(NamedTuple):
    """Positions mean the same in all prompts up to a length. Longer ones share no pages with those."""

    up_to: int
    each_length: bool  # longer ones share pages only with those of the same length


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of config.json that matter outside the model's own code."""

    architecture: str
    vocab_size: int
    max_model_len: int  # as far as positions allow
    checkpoint_dtype: str  # torch's name, such as "bfloat16"
    text_part_of: str = ""  # the architecture of the whole model, which takes images or sound, too
    quantization: Quantization | None = None  # of the weights; None: they are floats
    kv_scales: KVScaleType | None = None  # the type of KV for which the checkpoint brings scales

    @property
    def kv(self) -> tuple[KVShape, ...]:
        """What each layer keeps."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Of what layers keep of a row whatever its length, all together."""
        return 0

    @property
    def num_layers(self) -> int:
        return len(self.kv)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer."""
        return tuple(shape.window for shape in self.kv)

    @property
    def prompt_classes(self) -> PromptClasses | None:
        """Which prompts have pages that others cannot share, if there are such."""
        return None

    @property
    def num_step_weights(self) -> int:
        """Weights of the matrices that a decode step reads: all but a separate embedding."""
        return 0
