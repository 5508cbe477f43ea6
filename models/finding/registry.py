"""Finds the checkpoint that a configuration means, and its form."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from penstock.config.options import Config, ConfigError
from penstock.models.files.folder import HuggingFaceFolder
from penstock.models.files.source import Checkpoint
from penstock.models.gguf.choice import gguf_file


def _gguf(path: Path) -> Checkpoint | None:
    file = gguf_file(path)
    if file is None:
        return None
    from penstock.models.gguf.checkpoint import (
        GGUFCheckpoint,
    )  # imported here because it imports all families, which few processes need

    return GGUFCheckpoint(path, file)


FORMS: list[Callable[[Path], Checkpoint | None]] = [_gguf, HuggingFaceFolder.at]
"""Each returns a checkpoint if there is one of its form at a path. They are tried in this order."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`, without reading anything of it yet.

    Raises:
        ConfigError: there is no readable checkpoint.
    """
    found = next((found for form in FORMS if (found := form(path)) is not None), None)
    if found is not None:
        return found
    if path.is_file():
        raise ConfigError(
            f"{str(path)!r} is a file: name the folder that holds config.json and the weights, or a GGUF file"
        )
    raise ConfigError(f"no checkpoint folder at {str(path)!r}")


def open_model(config: Config) -> Checkpoint:
    """Open the configured checkpoint, or the bundled demo model's."""
    return open_checkpoint(model_path(config))


def model_path(config: Config) -> Path:
    """Return the path of the configured checkpoint, or of the demo model's."""
    return Path(config.model.model) if config.model.model else demo_path("model")


def demo_path(name: str) -> Path:
    """Return a folder of the demo model: "model", or "head", which guesses tokens for it."""
    spec = importlib.util.find_spec("penstock.demo")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the bundled demo model is not installed; name a checkpoint folder")
    return Path(next(iter(spec.submodule_search_locations))) / name


def served_model_names(config: Config) -> tuple[str, ...]:
    """Return the model names that the API accepts; the first one is reported.

    By default this is what was asked for, and of a GGUF file the name without its folder, its number and ".gguf".
    """
    if config.model.served_model_name:
        return config.model.served_model_name
    if not config.model.model:
        return ("penstock-demo",)
    if config.model.model.lower().endswith(".gguf") or Path(config.model.model).is_file():
        return (re.sub(r"-\d{5}-of-\d{5}$", "", Path(config.model.model).stem) or "model",)
    return (config.model.model.rstrip("/"),) if config.model.model.strip("/") else ("model",)
