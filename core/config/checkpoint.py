"""What every process may want to know of a checkpoint folder without loading it."""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.config.options import Config, ConfigError


def model_dir(config: Config) -> Path:
    """The checkpoint folder: the one asked for, or the bundled demo model's.

    Raises:
        ConfigError: if it is missing or has no config.json.
    """
    folder = Path(config.model.model) if config.model.model else _demo_dir()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{str(folder)!r} is no checkpoint folder: it has no config.json")
    return folder


def served_model_names(config: Config) -> tuple[str, ...]:
    """The names that the API answers to; the first one is reported."""
    if config.model.served_model_name:
        return config.model.served_model_name
    if not config.model.model:
        return ("penstock-demo",)
    return (config.model.model.rstrip("/"),) if config.model.model.strip("/") else ("model",)


def _demo_dir() -> Path:
    spec = importlib.util.find_spec("penstock.demo")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the bundled demo model is not installed; name a checkpoint folder")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file; an absent file is an empty object.

    Raises:
        ConfigError: if the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is not a JSON object: {error}") from None


def fingerprint(folder: Path) -> str:
    """16 hex digits that tell two checkpoints' architectures apart; peers compare them in their hello."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a sequence: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found:
            return tuple(int(token_id) for token_id in found)
    return ()
