"""What MODEL means: a path, or the name of a checkpoint in the local cache of the Hugging Face hub.

    CACHE/models--org--name/refs/main              names the snapshot
    CACHE/models--org--name/snapshots/<revision>/  is the checkpoint folder

Nothing is downloaded.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.core.config.options import Config, ConfigError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def located(config: Config, environment: Mapping[str, str] = os.environ) -> Config:
    """Replace MODEL by the path that it means, and serve it under the name that was given.

    Done once, before any process starts: all must read the same files, whatever is downloaded in the meantime.

    Raises:
        ConfigError: there is no such checkpoint; the message says what to do.
    """
    given = config.model.model
    if not given:
        return config
    folder, name = _find(given, environment)
    names = config.model.served_model_name or ((name,) if name else ())
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, model=str(folder), served_model_name=names)
    )


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Where downloads from the hub are kept; reads the same variables as the `hf` command."""
    for name, rest in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if environment.get(name):
            return Path(environment[name]).expanduser() / rest
    home = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "huggingface" / "hub"


def _find(given: str, environment: Mapping[str, str]) -> tuple[Path, str]:
    """Return the path, and the name to serve it under if that is not the path itself."""
    path = Path(given).expanduser()
    if _is_folder(path):
        if _is_there(path / "snapshots") and not _is_there(path / "config.json"):
            return _snapshot(path), path.resolve().name.removeprefix("models--").replace("--", "/")
        return path, "" if path == Path(given) else given
    if _is_there(path):
        return path, "" if path == Path(given) else given
    if not _HUB_NAME.fullmatch(given):
        raise ConfigError(f"no checkpoint folder at {given!r}")
    cache = hub_cache(environment)
    cached = cache / f"models--{given.replace('/', '--')}"
    if _is_there(cached / "snapshots"):
        return _snapshot(cached), given
    raise ConfigError(
        f"no checkpoint folder at {given!r}, and no download of that name in {str(cache)!r}; "
        f"`hf download {given}` fetches it"
    )


def _is_folder(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return path.is_dir()
    return False


def _is_there(path: Path) -> bool:
    """Whether this file or folder exists; false if the name is invalid (too long, or with a zero byte)."""
    with suppress(OSError, ValueError):
        return path.exists()
    return False


def _snapshot(cached: Path) -> Path:
    """The checkpoint folder within a model's folder of the cache.

    Raises:
        ConfigError: there is none, or it is ambiguous.
    """
    with suppress(OSError, UnicodeDecodeError):
        revision = (cached / "refs" / "main").read_text().strip()
        if revision and "/" not in revision and (cached / "snapshots" / revision).is_dir():
            return cached / "snapshots" / revision
    found = sorted(path for path in (cached / "snapshots").iterdir() if path.is_dir())
    if len(found) == 1:
        return found[0]
    name = cached.name.removeprefix("models--").replace("--", "/")
    if not found:
        raise ConfigError(f"{str(cached)!r} contains no snapshot; `hf download {name}` completes it")
    raise ConfigError(f"{str(cached)!r} has {len(found)} snapshots and no refs/main; give the folder of one of them")
