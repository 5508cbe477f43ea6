"""Adapters' keys, NAME@VERSION: the version is a digest of the files, so another content is another adapter."""

from hashlib import blake2b
from pathlib import Path

from penstock.config import ConfigError

_WEIGHTS = (".safetensors", ".gguf")


def key_of(name: str, path: str) -> str:
    """The key of what is at a path now. Reads the weights once.

    Raises:
        ConfigError: it cannot be read.
    """
    place = Path(path)
    digest = blake2b(digest_size=8)
    try:
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        for file in files:
            if file.name == "adapter_config.json" or file.suffix in _WEIGHTS:
                digest.update(file.name.encode() + file.stat().st_size.to_bytes(8, "little"))
                with file.open("rb") as content:
                    while piece := content.read(1 << 20):
                        digest.update(piece)
    except OSError as error:
        raise ConfigError(f"cannot read {path!r}: {error.strerror}") from None
    return f"{name}@{digest.hexdigest()}"


def name_of(key: str) -> str:
    """The name in a key."""
    return key.rpartition("@")[0]
