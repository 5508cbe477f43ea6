"""The interface of checkpoints of every form, for all processes.

Each form is a class in its own file (`folder.py`), listed in `finding/registry.py`. Nothing here needs torch: a tensor
is a shape, the name of its dtype, and bytes.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.config.options import ConfigError


class LoadError(ConfigError):
    """A checkpoint's weights cannot be loaded; the message is one clear sentence."""


class Incomplete(LoadError):
    """Files are missing that a download would provide."""


class StoredTensor(NamedTuple):
    """A tensor as it is stored."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as "BF16"
    num_bytes: int
    read: Callable[[], memoryview]
    """Returns the elements, row by row, little-endian; if possible, as a view of the mapped file."""
    read_rows: Callable[[int, int], memoryview] | None = None
    """Returns only the rows from one up to another; set if `read` has to compute the elements."""

    @property
    def num_elements(self) -> int:
        """Number of elements, quantized or not."""
        return math.prod(self.shape)


class Checkpoint(Protocol):
    """One model. Members use the terms of Hugging Face's files, and are empty if the checkpoint has no such file.

    Every member raises a ConfigError with one clear sentence if what it reads is missing or damaged.
    """

    @property
    def path(self) -> Path:
        """Its location, by which another process opens it."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Architecture, sizes and settings of the model: config.json."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Sampling defaults and tokens that end a text: generation_config.json."""
        ...

    @property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """Special tokens by name, and added tokens: tokenizer_config.json with special_tokens_map.json."""
        ...

    @property
    def processor_config(self) -> Mapping[str, Any]:
        """How images become pixel values, and their placeholders in a text: processor_config.json.

        Its `image_processor` has the contents of preprocessor_config.json. Empty: the model takes no images.
        """
        ...

    def tokenizer(self) -> bytes:
        """tokenizer.json, for the `tokenizers` library."""
        ...

    def chat_template(self) -> str | None:
        """The template's Jinja source; None if the model is not for chats."""
        ...

    def embedding_modules(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Name and settings of each sentence-transformers module: modules.json. Empty: not an embedding model."""
        ...

    def module_tensors(self, number: int) -> dict[str, StoredTensor]:
        """Return the tensors of one of these modules, for modules that have their own."""
        ...

    @property
    def embedding_config(self) -> Mapping[str, Any]:
        """Prompts by name, and which is the default: config_sentence_transformers.json."""
        ...

    def tensors(self) -> dict[str, StoredTensor]:
        """Return all tensors, by their names in `transformers`. Reads only headers.

        Raises:
            LoadError: there are none, or they cannot be read.
        """
        ...


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return 16 hex digits that identify the checkpoint's architecture; peers compare them in their hello."""
    return hashlib.sha256(msgspec.json.encode(checkpoint.config, order="sorted")).hexdigest()[:16]


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the ids that end a sequence: those of the generation defaults, else the model's.

    Raises:
        ConfigError: they are not token ids.
    """
    for name, fields in (("generation_config.json", checkpoint.generation_config), ("config.json", checkpoint.config)):
        found = fields.get("eos_token_id")
        listed = found if isinstance(found, list) else [] if found is None else [found]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 for token_id in listed):
            raise ConfigError(f"{name}: eos_token_id must be a token id or a list of them, got {str(found)[:64]}")
        if listed:
            return tuple(listed)
    return ()
