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
        raise ConfigError(f"{str(folder)!r} is no checkpoint folder: {_what_else(folder)}")
    return folder


# file that some other kind of folder has -> what to say of it
_OTHER_FOLDERS = {
    "adapter_config.json": "it holds a LoRA adapter, which is not supported yet; merge it into its model "
    "(PEFT: merge_and_unload) and serve the result",
    "model_index.json": "it holds a pipeline of the diffusers library; models that generate text are served",
    "params.json": "it holds a model in its maker's own format; serve the one with a config.json",
    "*.gguf": "it holds GGUF files, which are not supported yet; serve the checkpoint in safetensors that they were "
    "made from",
}


def _what_else(folder: Path) -> str:
    for name, said in _OTHER_FOLDERS.items():
        if any(folder.glob(name)):
            return said
    return "it has no config.json"


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
    """The ids that end a sequence: generation_config.json's, else config.json's.

    Raises:
        ConfigError: they are no ids.
    """
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id")
        listed = found if isinstance(found, list) else [] if found is None else [found]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 for token_id in listed):
            raise ConfigError(f"{name}: eos_token_id must be a token id or a list of them, got {str(found)[:64]}")
        if listed:
            return tuple(listed)
    return ()
