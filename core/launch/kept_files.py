"""Copies of files that decide what processes load, so that restarted processes read the same as at the start."""

import shutil
from pathlib import Path

from msgspec.structs import replace

from penstock.config import Config, ConfigError


def with_kept_files(config: Config, folder: Path) -> Config:
    """Let workers read a copy of --expert-load: all ranks must place experts alike, whenever they start.

    Raises:
        ConfigError: if the file cannot be read.
    """
    if not config.parallel.expert_load:
        return config
    kept = folder / "expert-load.json"
    try:
        shutil.copyfile(config.parallel.expert_load, kept)
    except OSError as error:
        raise ConfigError(f"--expert-load: cannot keep {config.parallel.expert_load!r}: {error.strerror}") from None
    return replace(config, parallel=replace(config.parallel, expert_load=str(kept)))
