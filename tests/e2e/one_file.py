"""A form of checkpoint that only tests know: everything in one file of MessagePack."""

from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec

from penstock.models.files.source import Checkpoint, StoredTensor

_SUFFIX = ".onefile"


class OneFile:
    """See `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def at(cls, path: Path) -> Self | None:
        return cls(path) if path.suffix == _SUFFIX and path.is_file() else None

    @cached_property
    def _parts(self) -> dict[str, Any]:
        return msgspec.msgpack.decode(self.path.read_bytes(), type=dict[str, Any])

    @property
    def config(self) -> dict[str, Any]:
        return dict(self._parts["config"])

    @property
    def generation_config(self) -> dict[str, Any]:
        return dict(self._parts["generation_config"])

    @property
    def tokenizer_config(self) -> dict[str, Any]:
        return dict(self._parts["tokenizer_config"])

    @property
    def processor_config(self) -> dict[str, Any]:
        return {}

    def tokenizer(self) -> bytes:
        return bytes(self._parts["tokenizer"])

    def chat_template(self) -> str | None:
        template: str | None = self._parts["chat_template"]
        return template

    def embedding_modules(self) -> list[tuple[str, dict[str, Any]]]:
        return []

    def module_tensors(self, number: int) -> dict[str, StoredTensor]:
        return {}

    @property
    def embedding_config(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, StoredTensor]:
        def stored(shape: list[int], dtype: str, data: bytes) -> StoredTensor:
            return StoredTensor(tuple(shape), dtype, len(data), lambda: memoryview(bytearray(data)))

        return {name: stored(*entry) for name, entry in self._parts["tensors"].items()}


def write_one_file(source: Checkpoint, folder: Path) -> Path:
    """The same checkpoint in one file, in a folder without anything else of it."""
    parts = {
        "config": source.config,
        "generation_config": source.generation_config,
        "tokenizer_config": source.tokenizer_config,
        "tokenizer": source.tokenizer(),
        "chat_template": source.chat_template(),
        "tensors": {name: (t.shape, t.dtype, bytes(t.read())) for name, t in source.tensors().items()},
    }
    path = folder / f"model{_SUFFIX}"
    path.write_bytes(msgspec.msgpack.encode(parts))
    return path
