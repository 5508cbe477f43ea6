"""Adapters' keys, NAME@VERSION: the version is a digest of the files, so another content is another adapter."""

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from penstock.config import ConfigError

_CONFIG, _WEIGHTS, _ONE_FILE = "adapter_config.json", "adapter_model.safetensors", ".gguf"
_PIECE = 1 << 20


def is_one_file(path: Path) -> bool:
    """Whether an adapter is a GGUF file, as llama.cpp writes it, rather than a folder of PEFT's."""
    return path.suffix.lower() == _ONE_FILE


def files_of(path: Path) -> tuple[Path, ...]:
    """All that is read of an adapter's weights: the GGUF file, or PEFT's configuration and matrices."""
    return (path,) if is_one_file(path) else (path / _CONFIG, path / _WEIGHTS)


class Version:
    """The digest of an adapter's files, which are noted in their order."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=8)

    def note(self, name: str, num_bytes: int, pieces: Iterable[bytes]) -> None:
        """A file, and its content in any pieces."""
        self._digest.update(name.encode() + num_bytes.to_bytes(8, "little"))
        for piece in pieces:
            self._digest.update(piece)

    def __str__(self) -> str:
        return self._digest.hexdigest()


def key_of(name: str, path: str) -> str:
    """The key of what is at a path now. Reads the weights once.

    Raises:
        ConfigError: it cannot be read.
    """
    version = Version()
    try:
        for file in files_of(Path(path)):
            with file.open("rb") as content:
                size = os.fstat(content.fileno()).st_size
                version.note(file.name, size, iter(lambda: content.read(_PIECE), b""))
    except OSError as error:
        raise ConfigError(f"cannot read {(error.filename or path)!r}: {error.strerror}") from None
    return f"{name}@{version}"


def weights_bytes(path: str) -> int:
    """The bytes of an adapter's matrices; 0 if they cannot be read."""
    try:
        return files_of(Path(path))[-1].stat().st_size
    except OSError:
        return 0


def name_of(key: str) -> str:
    """The name in a key."""
    return key.rpartition("@")[0]


def version_of(key: str) -> str:
    """The version in a key."""
    return key.rpartition("@")[2]
