"""The metadata of a GGUF file, checked when read. Keys of the architecture are given without their prefix."""

import struct
from collections.abc import Mapping
from typing import Any

from penstock.config.options import ConfigError
from penstock.models.files.source import StoredTensor
from penstock.models.gguf.block_types import FLOATS
from penstock.models.parsing.json_fields import JsonFields

_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NO_TOKEN = 0xFFFF_FFFF
"""What files say for a special token that the model has not: -1, in 32 bits."""


class Keys:
    """Metadata and the list of tensors. Methods raise ConfigError if a key is missing or has another type."""

    def __init__(self, file: str, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
        self._fields = JsonFields(file, metadata)
        self._tensors = tensors
        self._prefix = f"{self.architecture}."

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        name = self._fields.text("general.architecture")
        if not name:
            raise ConfigError("the GGUF file has no general.architecture: it is not a model")
        return name

    @property
    def dtype(self) -> str:
        """torch's name of the dtype of the embedding and most matrices; bfloat16 if they are quantized."""
        kinds = [its.dtype for its in self._tensors.values() if len(its.shape) > 1]
        most = max(kinds, key=kinds.count, default="BF16")
        return _TORCH_NAMES[most] if most in FLOATS else "bfloat16"

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        usual = self.whole("embedding_length") // self.of_all_layers("attention.head_count")
        return self.whole("attention.key_length", usual)

    def raw(self, key: str) -> Any:
        """The raw value; None if it is absent."""
        return self._fields.raw(self._prefix + key)

    def has(self, key: str) -> bool:
        """Whether the architecture's key is there."""
        return self._fields.has(self._prefix + key)

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer."""
        return self._fields.whole(self._prefix + key, default, least=least)

    def of_all_layers(self, key: str, default: int | None = None) -> int:
        """An integer that files may give for each layer; it must be the same for all."""
        value = self.raw(key)
        if not isinstance(value, list):
            return self.whole(key, default, least=0)
        if not value or any(item != value[0] for item in value):
            raise ConfigError(f"GGUF files whose layers differ in {self._prefix}{key} are not supported")
        return JsonFields("GGUF", {key: value[0]}).whole(key, least=0)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of at least 0."""
        if default is None and not self.has(key):
            raise ConfigError(f"the GGUF file lacks {self._prefix}{key}, which its architecture needs")
        # Stored in fp32: return 1e-06 rather than 9.999999974752427e-07.
        return _shortest(self._fields.number(self._prefix + key, default or 0.0))

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        return self._fields.flag(self._prefix + key, default)

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        return self._fields.text(self._prefix + key, default)

    def token_id(self, name: str) -> int | None:
        """A token id of the tokenizer; None if there is no such token."""
        key = f"tokenizer.ggml.{name}"
        id_ = self._fields.whole(key, NO_TOKEN, least=0, most=NO_TOKEN)
        return None if id_ == NO_TOKEN else id_

    def has_tensor(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._tensors

    def has_any_tensor(self, ending: str) -> bool:
        """Whether there is a tensor whose name ends so."""
        return any(name.endswith(ending) for name in self._tensors)

    def num_rows(self, name: str) -> int:
        """The number of rows of a tensor."""
        return self._tensor(name).shape[0]

    def floats(self, name: str) -> list[float]:
        """The numbers of a small fp32 tensor."""
        stored = self._tensor(name)
        if stored.dtype != "F32" or stored.num_elements > 1 << 16:
            raise ConfigError(f"{name} of the GGUF file must be a few F32 numbers, and is {stored.dtype}")
        return [_shortest(number) for number in stored.read().cast("f")]

    def _tensor(self, name: str) -> StoredTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise ConfigError(f"the GGUF file lacks the tensor {name}: it is not a whole model")
        return stored


_MAX_FP32 = 3.4028234663852886e38


def _shortest(number: float) -> float:
    """Return the shortest decimal number that equals this one in fp32; the number itself if fp32 does not have it."""
    if not abs(number) <= _MAX_FP32:
        return number
    stored = struct.pack("<f", number)
    texts = (f"{number:.{digits}g}" for digits in range(1, 10))
    return next(float(text) for text in texts if struct.pack("<f", float(text)) == stored)
