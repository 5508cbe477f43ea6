"""Chooses a GGUF file: by path, or in a repository that has the same model in several quantizations."""

import re
from collections.abc import Collection
from pathlib import Path

from penstock.config.options import ConfigError
from penstock.models.gguf.container import MAGIC, gguf_models

_SUFFIX = ".gguf"
_OTHER_WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
_USUAL = ("Q4_K_M", "Q8_0")
"""Taken if there are several and none is chosen, as in llama.cpp."""


def gguf_file(path: Path) -> Path | None:
    """Return a GGUF file at this path, or that of a folder that holds one GGUF model and no other format.

    Raises:
        ConfigError: the folder holds several GGUF models and no other format.
    """
    if path.is_file() and (path.suffix.lower() == _SUFFIX or _begins_as_gguf(path)):
        return path
    if not path.is_dir() or any(found for kind in _OTHER_WEIGHTS for found in path.glob(kind)):
        return None
    files = gguf_models([file.name for file in path.glob(f"*{_SUFFIX}")])
    if len(files) > 1:
        raise ConfigError(
            f"{str(path)!r} holds {len(files)} GGUF files: name one of them, such as {str(path / files[0])!r}"
        )
    return path / files[0] if files else None


def _begins_as_gguf(path: Path) -> bool:
    """Whether it is one by its first bytes, whatever its name: Ollama keeps its downloads as sha256-..."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def has_only_gguf(names: Collection[str]) -> bool:
    """Return whether these files are a GGUF model, and no other format."""
    return bool(gguf_models(_of_gguf(names))) and not any(name.endswith(".safetensors") for name in names)


def chosen_file(where: str, names: Collection[str], choice: str) -> str:
    """Return the file whose name has this word; of several parts, the first.

    Args:
        where: the repository or folder, for messages.
        names: its files.
        choice: such as "Q4_K_M", in upper or lower case; empty: the only one, or a usual one.

    Raises:
        ConfigError: there is none, or several.
    """
    models = gguf_models(_of_gguf(names))
    if not models:
        raise ConfigError(f"{where} has no GGUF files, so {where}:{choice} means nothing")
    for word in (choice,) if choice else _USUAL:
        found = [name for name in models if _has_word(name, word)]
        if len(found) == 1:
            return found[0]
    if len(models) == 1 and not choice:
        return models[0]
    shown = ", ".join(models[:12]) + (f" and {len(models) - 12} more" if len(models) > 12 else "")
    said = f"no GGUF file, or several, of {choice!r}" if choice else f"{len(models)} GGUF files"
    raise ConfigError(f"{where} has {said}: name one as in {where}:Q4_K_M, of {shown}")


def _of_gguf(names: Collection[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(_SUFFIX) and "/" not in name]


def _has_word(name: str, word: str) -> bool:
    return re.search(rf"(^|[-._]){re.escape(word)}(?=[-._])", name, re.IGNORECASE) is not None
