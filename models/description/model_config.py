"""What the engine must know about every model; the families' own configurations extend it."""

from typing import NamedTuple

import msgspec

from penstock.models.formats.format import Quantization
from penstock.models.formats.kv_scales import KVScaleType


class KVShape(NamedTuple):
    """What a layer keeps of each position, and for how long."""

    num_heads: int
    key_dim: int
    value_dim: int  # 0: values are the first numbers of the keys
    window: int | None  # position p needs those in (p - window, p]; None: all before it


class PromptClasses(NamedTuple):
    """Prompts up to a length interpret positions alike. Longer ones share no pages with them."""

    up_to: int
    each_length: bool  # whether longer prompts share pages only with prompts of their own length


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that matter outside the model's own code."""

    architecture: str
    vocab_size: int
    max_model_len: int  # the limit of its positions
    checkpoint_dtype: str  # torch's name, such as "bfloat16"
    text_part_of: str = ""  # the architecture of the whole model, if that also takes images or sound
    quantization: Quantization | None = None  # of the weights; None: they are floats
    draws_tokens: bool = True  # False: the model turns texts into vectors or classes only
    num_classes: int = 0  # of the head that classifies a pooled hidden state; 0: there is none
    kv_scales: KVScaleType | None = None  # the type of KV for which the checkpoint has scales

    @property
    def kv(self) -> tuple[KVShape, ...]:
        """What each layer keeps of a position."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Bytes of all layers' states of a row, whatever its length."""
        return 0

    @property
    def why_whole(self) -> str:
        """Why it can neither be split nor quantized, after its name; for models that are no described decoders."""
        return "is computed by transformers' code"

    @property
    def num_layers(self) -> int:
        return len(self.kv)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(shape.window for shape in self.kv)

    @property
    def prompt_classes(self) -> PromptClasses | None:
        """Which prompts have pages that others cannot share; None if all can."""
        return None

    @property
    def num_step_weights(self) -> int:
        """Weights of the matrices that a decode step reads: all but a separate embedding."""
        return 0
